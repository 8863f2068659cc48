#include "kernels/seeded_dropout.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::seeded_dropout) seeded_dropout;
}  // namespace liger::gpu

namespace liger::cpu {

void seeded_dropout(const SeededDropout& a, Stream stream) {
  Buffer x = in("x", a.x, a.add ? a.count * a.rows : a.rows, a.cols);
  Buffer out = a.add ? matrix("out", a.out, a.rows, a.cols, Content::both) : cpu::out("out", a.out, a.count * a.rows, a.cols);
  (a.add ? x : out).each *= a.count;
  const Buffers buffers{x, out, in("seed", a.seed, 1, i64)};
  gpu::seeded_dropout(a, stream);
}

}  // namespace liger::cpu
