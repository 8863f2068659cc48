// The fused loss's small passes: scaling and casting, filling with a bias, column sums, and products of scale factors.
#pragma once
#include "kernels/types.h"

namespace liger {

// out = in * scale * (row_scale[row]), rounded to out.dtype. scale and row_scale may be absent. in and out must not overlap
// unless they are the same memory with the same dtype.
struct ScaleCast {
  int64_t rows, cols;
  Rows in;
  MutableRows out;
  const void* scale;     // one value of accumulator(in.dtype) in device memory, or nullptr
  Rows row_scale;        // one element a row, any dtype, stride in elements; or data == nullptr
};

// Copies `values`, a bias, into every row of `matrix`. A matmul adds its product to it (gemm.h).
struct FillRows {
  int64_t rows, cols;
  MutableRows matrix;
  Vector values;
};

// sum (accumulator type, [cols]) = (accumulate ? sum : 0) + column sums of `in`, each row times its row_scale if there is one.
// Fixed order.
struct ColumnSum {
  int64_t rows, cols;
  Rows in;
  Rows row_scale;
  void* sum;
  bool accumulate;
  void* workspace;
};

// out[0] = scale * (a ? a[0] : 1) * (b ? b[0] : 1). `b` and `out` have the accumulator type, `a` and `factors` any dtype.
// With factors, also out[1] = out[0] * m and out[2] = 1 / m. m is the smallest power of two that is not below the largest magnitude of the
// factors (1 if that is 0 or not finite). So factor[i] * out[2] is exact and at most 1 in magnitude, and out[1] compensates for out[2].
struct ScalarProduct {
  Vector a;
  const void* b;
  double scale;
  Dtype accumulator;
  void* out;
  Rows factors;         // one per row, or data == nullptr
  int64_t rows;         // of factors
};

namespace LIGER_BACKEND {
void scale_cast(const ScaleCast&, Stream);
void fill_rows(const FillRows&, Stream);
int64_t column_sum_workspace(const ColumnSum&, Stream);
void column_sum(const ColumnSum&, Stream);
void scalar_product(const ScalarProduct&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
