#include "kernels/dequantize_4bit.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::dequantize_4bit) dequantize_4bit;
}  // namespace liger::gpu

namespace liger::cpu {

void dequantize_4bit(const Dequantize4bit& a, Stream stream) {
  const int64_t blocks = a.blocks(), scales = (blocks + a.absmax_blocksize - 1) / a.absmax_blocksize;
  const bool compressed = a.absmax_code != nullptr;
  const Buffers buffers{in("packed", a.packed, (a.numel() + 1) / 2, 1),       in("absmax", a.absmax, blocks, compressed ? 1 : f32),
                        optional(in("absmax_code", a.absmax_code, 256, f32)), in("absmax_scales", a.absmax_scales, scales, f32),
                        in("absmax_offset", a.absmax_offset, 1, f32),         out("out", a.out, a.rows, a.cols)};
  gpu::dequantize_4bit(a, stream);
}

}  // namespace liger::cpu
