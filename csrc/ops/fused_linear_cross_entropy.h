// The language-model head and cross entropy as one op: its forward, and its two backwards (fused_linear.h).
#pragma once
#include <tuple>

#include "checks/fused_linear_cross_entropy.h"
#include "ops/loss.h"

namespace liger::LIGER_BACKEND {

struct FusedLossResults {
  Tensor loss, z_loss, token_accuracy, predicted_tokens, entropy, mean_logits, log_sum_sq;
  Tensor counts, saved, dx, dweight, dbias;  // for the backward
};
FusedLossResults fused_loss(const FusedLoss&);

struct FusedLossGradients {
  Tensor dx, dweight, dbias;
};
// in_place: dweight, a result of the forward, becomes the gradient.
FusedLossGradients fused_loss_gradients(const FusedLoss&, bool in_place);

}  // namespace liger::LIGER_BACKEND
