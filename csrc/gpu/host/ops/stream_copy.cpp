#include "kernels/stream_copy.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::stream_copy) stream_copy;
}  // namespace liger::gpu

namespace liger::cpu {

void stream_copy(const StreamCopy& a, Stream stream) {
  const Buffers buffers{in("in", a.in, a.bytes / 16, 16), out("out", a.out, a.bytes / 16, 16)};
  gpu::stream_copy(a, stream);
}

}  // namespace liger::cpu
