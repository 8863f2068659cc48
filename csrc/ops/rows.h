// Forward and backward of the ops that map each row of one tensor to a row of the same length and dtype (softmax, relu_squared). The
// backward reads dy and the tensor that the forward saved.
#pragma once
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

template <class Forward> Tensor row_op(const char* op, const Tensor& x, void (*kernel)(const Forward&, Stream)) {
  const Scope scope(op, x);
  const RowsView rows = as_rows(scope, x);
  Tensor y = allocate_like(scope, x);
  if (x.numel() > 0) kernel({rows.rows, rows.cols, rows, mutable_rows(y)}, scope);
  return y;
}

template <class Backward>
Tensor row_op_backward(const char* op, const Tensor& dy, const Tensor& saved, void (*kernel)(const Backward&, Stream)) {
  const Scope scope(op, saved);
  const RowsView dy_rows = as_rows(scope, dy), rows = as_rows(scope, saved);
  Tensor dx = allocate_like(scope, saved);
  if (saved.numel() > 0) kernel({rows.rows, rows.cols, dy_rows, rows, mutable_rows(dx)}, scope);
  return dx;
}

}  // namespace liger::LIGER_BACKEND
