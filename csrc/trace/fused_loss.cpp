#include "trace/fused_loss.h"

#include "ops/fused_linear_cross_entropy.h"

namespace liger::trace {

size_t trace_fused_loss(const LossCall& call, const LossPlan& plan, Recorder& recorder) {
  const auto tensor = [&](std::initializer_list<int64_t> sizes, ScalarType type) {
    std::array<int64_t, 2> strides{1, 1};
    if (sizes.size() == 2) strides[0] = sizes.begin()[1];
    return Tensor(recorder, std::span(sizes), std::span(strides).first(sizes.size()), type);
  };
  const auto vector = [&](std::optional<Dtype> dtype) -> std::optional<Tensor> {
    if (!dtype) return {};
    return tensor({call.vocab}, scalar_type(*dtype));
  };
  recorder.counts = false;
  recorder.offset = call.aligned ? 0 : dtype_bytes(call.x);
  FusedLoss of;
  of.x = tensor({call.rows, call.hidden}, scalar_type(call.x));
  of.weight = tensor({call.vocab, call.hidden}, scalar_type(call.weight));
  of.target = tensor({call.rows}, ScalarType::Long);
  of.bias = vector(call.bias);
  of.ce_weight = vector(call.class_weight);
  if (call.temperature) of.temperature = tensor({call.rows}, scalar_type(accumulator(call.compute)));
  recorder.counts = true;
  of.reduction = int64_t(call.per_row ? Reduction::none : Reduction::mean);
  of.label_smoothing = call.label_smoothing ? 0.1 : 0;
  of.lse_square_scale = call.z_loss ? 1e-4 : 0;
  if (call.softcap) of.softcap = 30;
  of.use_token_scaling = call.token_scaling;
  of.return_z_loss = call.z_loss;
  of.return_token_accuracy = call.token_accuracy;
  of.return_predicted_tokens = call.predicted_tokens;
  of.return_entropy = of.return_mean_logits = of.return_log_sum_sq = call.moments;
  if (call.sum) of.accum_dtype = scalar_type(*call.sum);
  of.compute_dtype = scalar_type(call.compute);
  if (call.wide_logits) of.logits_dtype = scalar_type(accumulator(call.compute));
  of.gradients = int64_t(plan.gradients);
  of.chunk_rows = plan.rows;
  of.chunk_classes = plan.classes;
  of.need_dx = call.dx;
  of.need_dweight = call.dweight;
  of.need_dbias = call.dbias;

  const FusedLossResults made = fused_loss(of);
  const size_t of_forward = recorder.kernels.size();
  if (plan.gradients == launch::Gradients::none) return of_forward;
  of.counts = made.counts;
  of.saved = made.saved;
  of.dx = made.dx;
  of.dweight = made.dweight;
  of.dbias = made.dbias;
  // Autograd passes the upstream gradient: one number, or a tensor with one number for each row.
  const ScalarType loss_type = scalar_type(accumulator(call.compute));
  of.dloss = call.per_row ? tensor({call.rows}, loss_type) : tensor({}, loss_type);
  const bool sums = plan.gradients == launch::Gradients::accumulated || plan.gradients == launch::Gradients::overlaid;
  fused_loss_gradients(of, call.in_place && sums && call.dweight);
  return of_forward;
}

}  // namespace liger::trace
