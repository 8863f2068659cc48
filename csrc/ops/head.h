// A language-model head of rows x, logits = x @ weight^T + bias, and the gradients of its inputs: all matmuls of a fused loss, each of a
// range of rows and a range of classes. A faster matmul, or one of fewer rows, has its place here.
#pragma once
#include "checks/head.h"
#include "kernels/gemm.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

// Element `first` of a vector, and row `first` of a matrix, as a start.
inline Rows from_row(const Rows& r, int64_t first) { return {at(r.data, first * r.stride, r.dtype), r.stride, r.dtype}; }
inline MutableRows from_row(const MutableRows& r, int64_t first) { return {at(r.data, first * r.stride, r.dtype), r.stride, r.dtype}; }
inline Rows readable(const MutableRows& r) { return {r.data, r.stride, r.dtype}; }

// Rows that a matmul can read: they neither overlap nor are one row over and over.
RowsView as_matrix(const Scope& scope, const Tensor& t);

class Head {
 public:
  // The matmuls run in compute_dtype, or in the dtype that x and weight promote to; the gradient of the weight is summed over chunks in
  // accum_dtype, or in the accumulator's; logits are in logits_dtype, or in the matmuls'.
  Head(const Scope& scope, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::optional<ScalarType> accum_dtype,
       std::optional<ScalarType> compute_dtype, std::optional<ScalarType> logits_dtype);

  // out: of logits_dtype.
  void logits(Range rows, Range classes, const MutableRows& out) const;
  // What the gradient of such logits gives, times *alpha (1 if null); it is added to what is there if `accumulate`:
  //   dx[rows] = gradient @ weight[classes],  dweight[classes] = gradient^T @ x,  dbias[classes] = column sums of row_scale * gradient.
  void input_gradient(Range rows, Range classes, const Rows& gradient, const MutableRows& dx, const void* alpha, bool accumulate) const;
  void weight_gradient(Range classes, int64_t rows, const Rows& gradient, const Rows& x, const MutableRows& dweight, const void* alpha,
                       bool accumulate) const;
  void bias_gradient(Range classes, int64_t rows, const Rows& gradient, const Rows& row_scale, const Tensor& dbias, bool accumulate) const;

  const Tensor& x() const { return x_.tensor; }
  // x in the compute dtype.
  Rows x_rows() const { return in_dtype(x_, compute); }
  // May a matmul write this dtype?
  bool writes(Dtype dtype) const { return dtype == compute || dtype == acc; }
  int64_t overlaid_room() const { return liger::LIGER_BACKEND::overlaid_room(hidden, weight, compute); }
  SumSizes<int64_t> sum_sizes() const { return {vocab, hidden, sum, weight}; }
  // Are logits wider than the operands of the matmuls that take their gradient?
  bool wide_logits() const { return logits_dtype != compute; }
  bool has_bias() const { return bias_.has_value(); }
  Range all_rows() const { return {0, rows}; }
  Range all_classes() const { return {0, vocab}; }

  const Scope& scope;
  int64_t rows = 0, hidden = 0, vocab = 0;
  // The dtypes of the matmuls, of losses, of the sum of dweight over chunks, of weight, and of logits.
  Dtype compute{}, acc{}, sum{}, weight{}, logits_dtype{};

 private:
  // Cast at the first use, since a backward may need neither.
  Rows in_dtype(RowsView& operand, Dtype dtype) const;
  Rows weight_rows() const;

  const Tensor weight_tensor_;
  mutable RowsView x_;
  mutable std::optional<RowsView> weight_, bias_;
};

}  // namespace liger::LIGER_BACKEND
