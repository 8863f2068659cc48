// Partial rows of parameter gradients, which are sums over rows. The result has the same bits with any number of threads: the shape alone
// groups rows into blocks, each block adds its rows in order into its partial row, and the partial rows are added in order. This header
// holds plain declarations only, since code for the baseline and code for every other instruction set include it.
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
// Adds the partial rows with all threads; does nothing if `out` is absent. dispatch_rows.cpp
void sum_partials(const void* partials, int64_t blocks, int64_t stride, int64_t cols, Dtype accumulator, MutableVector out);

}  // namespace liger::cpu
