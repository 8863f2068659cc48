// Decodes 4-bit weights on the CPU: divides the blocks among threads.
#include "cpu/dispatch.h"
#include "kernels/dequantize_4bit.h"

namespace liger::cpu {

void dequantize_4bit(const Dequantize4bit& a, Stream) {
  const MutableRows blocks{a.out.data, a.blocksize, a.out.dtype};
  parallel_items(a, a.blocks(), a.blocksize, {MappedOutput(blocks, a.rows > 1 ? 0 : a.cols / a.blocksize, a.blocksize)});
}

}  // namespace liger::cpu
