// The language-model head, logits = x @ weight^T + bias, and the gradients of x, weight and bias. Each function is a matmul for a range of
// rows and a range of classes (the bias: a column sum). The fused loss has no other matmuls, so a faster matmul, or a matmul of fewer rows,
// belongs here.
#pragma once
#include "checks/head.h"
#include "kernels/gemm.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

// The rows of a matrix, or the elements of a vector, from `first` on.
inline Rows from_row(const Rows& r, int64_t first) { return {at(r.data, first * r.stride, r.dtype), r.stride, r.dtype}; }
inline MutableRows from_row(const MutableRows& r, int64_t first) { return {at(r.data, first * r.stride, r.dtype), r.stride, r.dtype}; }
inline Rows readable(const MutableRows& r) { return {r.data, r.stride, r.dtype}; }

// Rows that a matmul can read: rows that overlap, or are one expanded row, are copied.
RowsView as_matrix(const Scope& scope, const Tensor& t);

class Head {
 public:
  // Defaults: compute_dtype, of the matmuls, is the dtype that x and weight promote to; accum_dtype, of the sum of dweight over chunks, is
  // the accumulator's; logits_dtype is compute_dtype.
  Head(const Scope& scope, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::optional<ScalarType> accum_dtype,
       std::optional<ScalarType> compute_dtype, std::optional<ScalarType> logits_dtype);

  // out: in logits_dtype.
  void logits(Range rows, Range classes, const MutableRows& out) const;
  // The gradients of the inputs from the gradient of these logits, times *alpha (1 if null), added to the output if `accumulate`:
  //   dx[rows] = gradient @ weight[classes],  dweight[classes] = gradient^T @ x,  dbias[classes] = column sums of row_scale * gradient.
  void input_gradient(Range rows, Range classes, const Rows& gradient, const MutableRows& dx, const void* alpha, bool accumulate) const;
  void weight_gradient(Range classes, int64_t rows, const Rows& gradient, const Rows& x, const MutableRows& dweight, const void* alpha,
                       bool accumulate) const;
  void bias_gradient(Range classes, int64_t rows, const Rows& gradient, const Rows& row_scale, const Tensor& dbias, bool accumulate) const;

  const Tensor& x() const { return x_.tensor; }
  // x in the compute dtype.
  Rows x_rows() const { return in_dtype(x_, compute); }
  // Returns whether a matmul can write this dtype.
  bool writes(Dtype dtype) const { return dtype == compute || dtype == acc; }
  int64_t overlaid_room() const { return liger::LIGER_BACKEND::overlaid_room(hidden, weight, compute); }
  SumSizes<int64_t> sum_sizes() const { return {vocab, hidden, sum, weight}; }
  // Returns whether logits are wider than the operands of the matmuls that read their gradient.
  bool wide_logits() const { return logits_dtype != compute; }
  bool has_bias() const { return bias_.has_value(); }
  Range all_rows() const { return {0, rows}; }
  Range all_classes() const { return {0, vocab}; }

  const Scope& scope;
  int64_t rows = 0, hidden = 0, vocab = 0;
  // The dtypes of the matmuls, of losses, of the sum of dweight over chunks, of weight, and of logits.
  Dtype compute{}, acc{}, sum{}, weight{}, logits_dtype{};

 private:
  // Casts the operand at its first use: a backward may need neither x nor weight.
  Rows in_dtype(RowsView& operand, Dtype dtype) const;
  Rows weight_rows() const;

  const Tensor weight_tensor_;
  mutable RowsView x_;
  mutable std::optional<RowsView> weight_, bias_;
};

}  // namespace liger::LIGER_BACKEND
