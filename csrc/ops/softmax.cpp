#include "kernels/softmax.h"

#include "checks/rows.h"
#include "ops/rows.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor softmax_op(Tensor x) { return row_op("softmax", x, softmax_forward); }
Tensor softmax_backward_op(Tensor dy, Tensor y) { return row_op_backward("softmax_backward", dy, y, softmax_backward); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("softmax", boxed<softmax_op, check_softmax>);
  m.impl("softmax_backward", boxed<softmax_backward_op, check_softmax_backward>);
}

}  // namespace liger::LIGER_BACKEND
