// The last step of every column sum (dweight, dbias): partial rows in fp32, one per block of the kernel that made them, are
// added in a fixed order by a second kernel that is spread over the whole device. Where the hardware allows it, this kernel starts while
// the one before it still runs, and waits for its results: that one may call let_next_kernel_start() once it has read its inputs.
#pragma once
#include "gpu/device.h"
#include "kernels/types.h"

namespace liger::gpu {

struct PartialSums {
  const float* data;     // [rows, stride]
  int64_t rows, stride;
};

// Two totals at most, by one kernel: out[j] = (accumulate ? out[j] : 0) + sum over rows of partial[row][first_column + j], for j < cols.
struct ColumnTotal {
  int64_t first_column, cols;
  MutableVector out;     // data == nullptr: not wanted
  bool accumulate = false;
};
struct ColumnTotals {
  ColumnTotal first, second;
};
void sum_columns(const PartialSums& partial, ColumnTotals totals, Stream stream);

}  // namespace liger::gpu
