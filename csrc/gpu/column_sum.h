// The last step of every column sum (dweight, dbias). The kernel before it writes partial rows in fp32, one per block; a second kernel,
// spread over the whole device, adds them up in a fixed order. Where the hardware allows it (programmatic dependent launch), the second
// kernel starts while the first kernel still runs, and waits for the partial rows. For this, the first kernel may call
// let_next_kernel_start() once it has read its inputs.
#pragma once
#include "gpu/device.h"
#include "kernels/types.h"

namespace liger::gpu {

struct PartialSums {
  const float* data;     // [rows, stride]
  int64_t rows, stride;
};

// Up to two totals, computed by one kernel: out[j] = (accumulate ? out[j] : 0) + sum over rows of partial[row][first_column + j], for j <
// cols.
struct ColumnTotal {
  int64_t first_column, cols;
  MutableVector out;     // data == nullptr: this total is not computed
  bool accumulate = false;
};
struct ColumnTotals {
  ColumnTotal first, second;
};
void sum_columns(const PartialSums& partial, ColumnTotals totals, Stream stream);

}  // namespace liger::gpu
