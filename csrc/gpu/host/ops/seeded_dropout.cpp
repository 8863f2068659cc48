#include "kernels/seeded_dropout.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::seeded_dropout) seeded_dropout;
}  // namespace liger::gpu

namespace liger::cpu {

void seeded_dropout(const SeededDropout& a, Stream stream) {
  const Content content = a.add ? Content::both : Content::output;
  const Buffers buffers{in("x", a.x, a.rows, a.cols), matrix("out", a.out, a.rows, a.cols, content), in("seed", a.seed, 1, i64)};
  gpu::seeded_dropout(a, stream);
}

}  // namespace liger::cpu
