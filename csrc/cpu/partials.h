// Gradients of parameters are sums over rows. To be the same bits with any number of threads, rows are grouped into blocks by
// the shape alone: each block adds its rows in order into a partial row of its own, then the partial rows are added in order.
// Plain declarations only: this header is seen by baseline code and by every instruction set.
#pragma once
#include "kernels/types.h"

namespace liger::cpu {

int64_t rows_per_block(int64_t rows, int64_t cols);  // dispatch_rows.cpp

// out[column] = sum over blocks of data[block * stride + column]; items are groups of partial_columns columns.
struct SumPartials {
  const void* data;  // of `accumulator`
  int64_t blocks, stride, cols;
  Dtype accumulator;
  MutableVector out;
};
constexpr int64_t partial_columns = 256;
// By all threads; nothing where out is absent. dispatch_rows.cpp
void sum_partials(const void* partials, int64_t blocks, int64_t stride, int64_t cols, Dtype accumulator, MutableVector out);

}  // namespace liger::cpu
