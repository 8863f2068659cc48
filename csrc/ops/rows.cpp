// Ops of one tensor whose result has its shape and dtype, row by row: forward of x, and backward of dy and the tensor that was kept.
#include "checks/rows.h"
#include "kernels/relu_squared.h"
#include "kernels/softmax.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

template <class Forward> Tensor row_op(const char* op, const Tensor& x, void (*kernel)(const Forward&, Stream)) {
  const Scope scope(op, x);
  const RowsView rows = as_rows(scope, x);
  Tensor y = allocate_like(scope, x);
  if (x.numel() > 0) kernel({rows.rows, rows.cols, rows, mutable_rows(y)}, scope);
  return y;
}

template <class Backward>
Tensor row_op_backward(const char* op, const Tensor& dy, const Tensor& kept, void (*kernel)(const Backward&, Stream)) {
  const Scope scope(op, kept);
  const RowsView dy_rows = as_rows(scope, dy), rows = as_rows(scope, kept);
  Tensor dx = allocate_like(scope, kept);
  if (kept.numel() > 0) kernel({rows.rows, rows.cols, dy_rows, rows, mutable_rows(dx)}, scope);
  return dx;
}

Tensor relu_squared_op(Tensor x) { return row_op("relu_squared", x, relu_squared_forward); }
Tensor relu_squared_backward_op(Tensor dy, Tensor x) { return row_op_backward("relu_squared_backward", dy, x, relu_squared_backward); }

Tensor softmax_op(Tensor x) { return row_op("softmax", x, softmax_forward); }
Tensor softmax_backward_op(Tensor dy, Tensor y) { return row_op_backward("softmax_backward", dy, y, softmax_backward); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("relu_squared", boxed<relu_squared_op, check_relu_squared>);
  m.impl("relu_squared_backward", boxed<relu_squared_backward_op, check_relu_squared_backward>);
  m.impl("softmax", boxed<softmax_op, check_softmax>);
  m.impl("softmax_backward", boxed<softmax_backward_op, check_softmax_backward>);
}

}  // namespace liger::LIGER_BACKEND
