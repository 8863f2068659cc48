// Decodes 4-bit weights on the CPU, block by block: a block's scale times the 16 codes, rounded to the output's dtype, is a table from
// which the block's values are copied.
#include "kernels/dequantize_4bit.h"

#include <algorithm>

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

LIGER_INLINE float scale(const Dequantize4bit& a, int64_t block) {
  if (a.absmax_code == nullptr) return static_cast<const float*>(a.absmax)[block];
  const float code = a.absmax_code[static_cast<const uint8_t*>(a.absmax)[block]];
  return rounded(code * a.absmax_scales[block >> a.absmax_shift()]) + *a.absmax_offset;
}

// Copies the values i to i + count - 1, whose block has this table.
template <class T> LIGER_INLINE void copy_values(T* out, const T (&table)[16], const uint8_t* packed, int64_t i, int64_t count) {
  if (i % 2 && count > 0) {
    *out++ = table[packed[i / 2] & 15];
    ++i, --count;
  }
  packed += i / 2;
  for (int64_t k = 0; k < count / 2; ++k) {
    out[2 * k] = table[packed[k] >> 4];
    out[2 * k + 1] = table[packed[k] & 15];
  }
  if (count % 2) out[count - 1] = table[packed[count / 2] >> 4];
}

template <class T> [[gnu::flatten]] void decode_blocks(const Dequantize4bit& a, int64_t begin, int64_t end) {
  const float* const codes = a.codes().values;
  for (int64_t block = begin; block < end; ++block) {
    T table[16];
    const float factor = scale(a, block);
    for (int i = 0; i < 16; i += lanes<float>) store<float>(table + i, Whole{}, load<float>(codes + i, Whole{}) * factor);
    for (int64_t i = block * a.blocksize, last = std::min(i + a.blocksize, a.numel()); i < last;) {
      const int64_t row = i / a.cols, col = i % a.cols, count = std::min(last - i, a.cols - col);
      copy_values(static_cast<T*>(a.out.data) + row * a.out.stride + col, table, a.packed, i, count);
      i += count;
    }
  }
}

}  // namespace

template <> void run(const Dequantize4bit& a, int64_t begin, int64_t end) {
  if (a.out.dtype == Dtype::f64) return;  // refused by the op's check
  dispatch(a.out.dtype, [&](auto t) { decode_blocks<decltype(t)>(a, begin, end); });
}

}  // namespace liger::cpu::LIGER_ISA
