#include "kernels/softmax.h"

#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor softmax_op(Tensor x) {
  const Scope scope("softmax", x, "x");
  const RowsView rows = as_rows(scope.op(), x, "x");
  Tensor y = allocate_like(scope, x);
  if (x.numel() > 0) softmax_forward({rows.rows, rows.cols, rows, mutable_rows(y, "y")}, scope);
  return y;
}

Tensor softmax_backward_op(Tensor dy, Tensor y) {
  const Scope scope("softmax_backward", y, "y");
  check_device(scope.op(), dy, "dy", y, "y");
  check_same_shape(scope.op(), dy, "dy", y, "y");
  require(type_of(dy) == type_of(y), scope.op(), ": dy has dtype ", dtype_name(type_of(dy)), ", expected that of y, ",
          dtype_name(type_of(y)));
  const RowsView dy_rows = as_rows(scope.op(), dy, "dy"), y_rows = as_rows(scope.op(), y, "y");
  Tensor dx = allocate_like(scope, y);
  if (y.numel() > 0) softmax_backward({y_rows.rows, y_rows.cols, dy_rows, y_rows, mutable_rows(dx, "dx")}, scope);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("softmax", boxed<softmax_op>);
  m.impl("softmax_backward", boxed<softmax_backward_op>);
}

}  // namespace liger::LIGER_BACKEND
