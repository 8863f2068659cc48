#include "kernels/relu_squared.h"

#include "checks/rows.h"
#include "ops/rows.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor relu_squared_op(Tensor x) { return row_op("relu_squared", x, relu_squared_forward); }
Tensor relu_squared_backward_op(Tensor dy, Tensor x) { return row_op_backward("relu_squared_backward", dy, x, relu_squared_backward); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("relu_squared", boxed<relu_squared_op, check_relu_squared>);
  m.impl("relu_squared_backward", boxed<relu_squared_backward_op, check_relu_squared_backward>);
}

}  // namespace liger::LIGER_BACKEND
