#include "ops/head.h"

#include "kernels/elementwise.h"

namespace liger::LIGER_BACKEND {
namespace {

Matrix matrix(const Rows& r, bool transposed = false) { return {r.data, r.stride, r.dtype, transposed}; }

}  // namespace

RowsView as_matrix(const Scope& scope, const Tensor& t) {
  const RowsView view = as_rows(scope, t);
  return view.rows <= 1 || view.view.stride >= view.cols ? view : as_rows(scope, contiguous(scope, t));
}

Head::Head(const Scope& scope, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::optional<ScalarType> accum_dtype,
           std::optional<ScalarType> compute_dtype, std::optional<ScalarType> logits_dtype)
    : scope(scope), weight_tensor_(weight) {
  rows = x.size(0);
  hidden = x.size(1);
  vocab = weight.size(0);
  const HeadDtypes dtypes = head_dtypes(scope.op(), x, weight, accum_dtype, compute_dtype, logits_dtype);
  compute = dtypes.compute;
  acc = dtypes.acc;
  this->logits_dtype = dtypes.logits;
  this->weight = tensor_dtype(weight);
  sum = sum_dtype(dtypes, this->weight);
  if (bias) bias_ = as_rows(scope, *bias);
  x_ = as_matrix(scope, x);
}

void Head::logits(Range rows, Range classes, const MutableRows& out) const {
  const void* const bias = bias_ ? at(in_dtype(*bias_, logits_dtype).data, classes.first, logits_dtype) : nullptr;
  const Rows x = from_row(x_rows(), rows.first), weight = from_row(weight_rows(), classes.first);
  gemm({rows.count, classes.count, hidden, matrix(x), matrix(weight, true), out.data, out.stride, logits_dtype, nullptr, false, bias, true},
       scope);
}

void Head::input_gradient(Range rows, Range classes, const Rows& gradient, const MutableRows& dx, const void* alpha,
                          bool accumulate) const {
  const Rows weight = from_row(weight_rows(), classes.first);
  const MutableRows out = from_row(dx, rows.first);
  gemm({rows.count, hidden, classes.count, matrix(gradient), matrix(weight), out.data, out.stride, out.dtype, alpha, accumulate}, scope);
}

void Head::weight_gradient(Range classes, int64_t rows, const Rows& gradient, const Rows& x, const MutableRows& dweight, const void* alpha,
                           bool accumulate) const {
  const MutableRows out = from_row(dweight, classes.first);
  gemm({classes.count, hidden, rows, matrix(gradient, true), matrix(x), out.data, out.stride, out.dtype, alpha, accumulate}, scope);
}

void Head::bias_gradient(Range classes, int64_t rows, const Rows& gradient, const Rows& row_scale, const Tensor& dbias,
                         bool accumulate) const {
  ColumnSum args{rows, classes.count, gradient, row_scale, at(dbias.data_ptr(), classes.first, acc), accumulate, nullptr};
  const Tensor space = workspace(scope, column_sum_workspace(args, scope), x_.tensor);
  args.workspace = space.data_ptr();
  column_sum(args, scope);
}

Rows Head::weight_rows() const {
  if (!weight_) weight_ = as_matrix(scope, weight_tensor_);
  return in_dtype(*weight_, compute);
}

Rows Head::in_dtype(RowsView& operand, Dtype dtype) const {
  if (operand.view.dtype != dtype) {
    const Tensor copy = allocate_like(scope, operand.tensor, dtype);
    const MutableRows out = mutable_rows(copy);
    if (copy.numel() > 0) scale_cast({operand.rows, operand.cols, operand, out, nullptr, {}}, scope);
    operand = {copy, operand.rows, operand.cols, readable(out)};
  }
  return operand;
}

}  // namespace liger::LIGER_BACKEND
