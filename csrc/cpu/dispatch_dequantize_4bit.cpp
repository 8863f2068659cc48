// Decodes 4-bit weights on the CPU: divides the blocks among threads.
#include "cpu/dispatch.h"
#include "kernels/dequantize_4bit.h"

namespace liger::cpu {

void dequantize_4bit(const Dequantize4bit& a, Stream) {
  parallel_items(a, a.blocks(), a.blocksize,
                 {MappedOutput(MutableRows{a.out.data, a.blocksize, a.out.dtype}, a.numel / a.blocksize, a.blocksize)});
}

}  // namespace liger::cpu
