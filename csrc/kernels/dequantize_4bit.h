// Decodes 4-bit weights of bitsandbytes: value i is code(nibble i) * scale(i / blocksize). Its bits are those of bitsandbytes'
// dequantize_4bit. A byte holds two values, the first one in its upper half. The scales of the blocks are fp32, or compressed to 8 bits:
// scale(b) = absmax_code[absmax[b]] * absmax_scales[b / absmax_blocksize] + absmax_offset, with product and sum rounded separately.
#pragma once
#include <bit>

#include "kernels/types.h"

namespace liger {

enum class Code4bit : int32_t { nf4, fp4 };

// The values of the 16 nibbles, divided by the largest. nf4: arXiv:2305.14314, appendix E.
struct Codes4bit {
  float values[16];
};
inline constexpr Codes4bit codes_4bit[] = {
    {{-1.f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
      -0.09105003625154495f, 0.f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
      0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.f}},
    {{0.f, 0.0625f / 12, 8 / 12.f, 1.f, 4 / 12.f, 0.5f, 2 / 12.f, 0.25f, 0.f, -0.0625f / 12, -8 / 12.f, -1.f, -4 / 12.f, -0.5f, -2 / 12.f,
      -0.25f}}};

struct Dequantize4bit {
  int64_t rows, cols;  // value i is in row i / cols
  const uint8_t* packed;  // (numel + 1) / 2 bytes
  const void* absmax;     // one for each block: fp32, or uint8 if absmax_code is not null
  const float *absmax_code, *absmax_scales, *absmax_offset;
  Code4bit code;
  int64_t blocksize, absmax_blocksize;  // powers of two
  MutableRows out;        // a matrix without gaps between its rows is passed as one row

  int64_t numel() const { return rows * cols; }
  const Codes4bit& codes() const { return codes_4bit[static_cast<int>(code)]; }
  int64_t blocks() const { return (numel() + blocksize - 1) / blocksize; }
  int shift() const { return std::bit_width(static_cast<uint64_t>(blocksize)) - 1; }
  int absmax_shift() const { return std::bit_width(static_cast<uint64_t>(absmax_blocksize)) - 1; }
};

namespace LIGER_BACKEND {
void dequantize_4bit(const Dequantize4bit&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
