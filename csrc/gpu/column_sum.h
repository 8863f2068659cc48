// The last step of most column sums (dweight and dbias of the norms, dbias of the fused loss). The kernel before it writes partial rows in
// fp32; a second kernel, spread over the whole device, adds them up in a fixed order. The second kernel starts while the first kernel still
// runs, and waits for the partial rows, if the hardware allows it (programmatic dependent launch) and the first kernel calls
// let_next_kernel_start(), as NormBackwardRegisters does.
#pragma once
#include "gpu/device.h"
#include "kernels/types.h"
#include "launch/elementwise.h"

namespace liger::gpu {

struct PartialSums {
  const float* data;  // [rows, stride]; both multiples of four floats if the numbers of columns of all totals are multiples of four
  int64_t rows, stride;
};

// Up to two totals, computed by one kernel: out[j] = (accumulate ? out[j] : 0) + sum over rows of partial[row][first_column + j], for j <
// cols.
struct ColumnTotal {
  int64_t first_column, cols;
  MutableVector out;  // data == nullptr: this total is not computed
  bool accumulate = false;
};
struct ColumnTotals {
  ColumnTotal first, second;
};
// config: from launch::sum_columns, for the numbers of columns of these totals.
void sum_columns(const launch::Launch& config, const PartialSums& partial, ColumnTotals totals, Stream stream);

}  // namespace liger::gpu
