// Dropout whose mask depends on seed, stream, row and column only, so that a backward computes the mask of its forward again, for any tile
// of rows and on any device. Element [i, j] is x * scale where its 16-bit random number (math/philox.h: key seed, counter j / 8, first_row
// + i, stream) is at least `threshold`, and 0 elsewhere, also if x is NaN or infinite there. The product is rounded to fp32 (float64 for
// float64), so that sums have the same bits on every device.
#pragma once
#include "kernels/types.h"

namespace liger {

struct SeededDropout {
  int64_t rows, cols;
  Rows x;
  MutableRows out;
  bool add;  // true: adds to `out`, whose dtype may differ from x's; false: overwrites it
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
