#include "kernels/relu_squared.h"

#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor relu_squared_op(Tensor x) {
  const Scope scope("relu_squared", x, "x");
  const RowsView rows = as_rows(scope.op(), x, "x");
  Tensor y = allocate_like(scope, x);
  if (x.numel() > 0) relu_squared_forward({rows.rows, rows.cols, rows, mutable_rows(y, "y")}, scope);
  return y;
}

Tensor relu_squared_backward_op(Tensor dy, Tensor x) {
  const Scope scope("relu_squared_backward", x, "x");
  check_device(scope.op(), dy, "dy", x, "x");
  check_same_shape(scope.op(), dy, "dy", x, "x");
  require(type_of(dy) == type_of(x), scope.op(), ": dy has dtype ", dtype_name(type_of(dy)), ", expected that of x, ",
          dtype_name(type_of(x)));
  const RowsView dy_rows = as_rows(scope.op(), dy, "dy"), x_rows = as_rows(scope.op(), x, "x");
  Tensor dx = allocate_like(scope, x);
  if (x.numel() > 0) relu_squared_backward({x_rows.rows, x_rows.cols, dy_rows, x_rows, mutable_rows(dx, "dx")}, scope);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("relu_squared", boxed<relu_squared_op>);
  m.impl("relu_squared_backward", boxed<relu_squared_backward_op>);
}

}  // namespace liger::LIGER_BACKEND
