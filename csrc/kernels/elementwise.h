// Small passes that the fused loss is built from.
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

// Every row of `matrix` becomes `values`: a bias, to which a matmul adds (gemm.h).
struct FillRows {
  int64_t rows, cols;
  MutableRows matrix;
  Vector values;
};

// sum (accumulator type, [cols]) = (accumulate ? sum : 0) + column sums of `in`, each row times row_scale if there is one.
// Fixed order.
struct ColumnSum {
  int64_t rows, cols;
  Rows in;
  Rows row_scale;
  void* sum;
  bool accumulate;
  void* workspace;
};

// out[0] = scale * (a ? a[0] : 1) * (b ? b[0] : 1); all but `a` and `factors` of the accumulator type.
// With factors also out[1] = out[0] * m and out[2] = 1 / m, where m is the smallest power of two that is not below their largest magnitude
// (1 if that is 0 or not finite). So factor[i] * out[2] is exact and at most 1 in magnitude, and out[1] makes up for it.
struct ScalarProduct {
  Vector a;
  const void* b;
  double scale;
  Dtype accumulator;
  void* out;
  Rows factors;         // one a row, or data == nullptr
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
