// Dropout with several masks: of one matrix, which is read once, or of as many matrices, whose dropouts are added to another one, which is
// read and written once. A mask depends on seed, stream, row and column only, so that a backward computes the mask of its forward again,
// for any tile of rows and on any device. Element [i, j] is x * scale where its 16-bit random number (math/philox.h: key seed, counter
// j / 8, first_row + i, stream) is at least `threshold`, and 0 elsewhere, also if x is NaN or infinite there. The product is rounded to
// fp32 (float64 for float64), so that sums, which are rounded once, have the same bits on every device.
#pragma once
#include "kernels/types.h"

namespace liger {

struct SeededDropout {
  int64_t rows, cols, count;  // count: masks, of streams stream, stream + 1, ...
  Rows x;
  MutableRows out;
  bool add;  // false: x has `rows` rows, and out `rows` for each mask; true: x has these for each mask, and out, of any dtype, `rows`
  const int64_t* seed;  // one number, in the device's memory
  uint32_t stream;
  int64_t first_row;
  uint32_t threshold;  // 0 to 65536
  double scale;
};

namespace LIGER_BACKEND {
void seeded_dropout(const SeededDropout&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
