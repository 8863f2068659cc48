// Registers the fused loss's ops with torch.
#include "ops/fused_linear_cross_entropy.h"
#include "schemas.h"

namespace liger::LIGER_BACKEND {
namespace {

using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
ForwardResult forward_op(const FusedLoss& a) {
  const FusedLossResults r = fused_loss(a);
  return {r.loss, r.z_loss,  r.token_accuracy, r.predicted_tokens, r.entropy, r.mean_logits, r.log_sum_sq, r.counts, r.saved,
          r.dx,   r.dweight, r.dbias};
}

std::tuple<Tensor, Tensor, Tensor> backward_op(const FusedLoss& a) {
  const FusedLossGradients gradients = fused_loss_gradients(a, false);
  return {gradients.dx, gradients.dweight, gradients.dbias};
}

std::tuple<Tensor, Tensor> backward_in_place_op(const FusedLoss& a) {
  const FusedLossGradients gradients = fused_loss_gradients(a, true);
  return {gradients.dx, gradients.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("fused_linear_cross_entropy", boxed<forward_op, check_fused_linear_cross_entropy, schemas::fused_linear_cross_entropy>);
  m.impl("fused_linear_cross_entropy_backward",
         boxed<backward_op, check_fused_linear_cross_entropy_backward, schemas::fused_linear_cross_entropy_backward>);
  m.impl("fused_linear_cross_entropy_backward_",
         boxed<backward_in_place_op, check_fused_linear_cross_entropy_backward_in_place, schemas::fused_linear_cross_entropy_backward_>);
}

}  // namespace liger::LIGER_BACKEND
