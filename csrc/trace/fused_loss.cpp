#include "trace/fused_loss.h"

#include "ops/fused_linear_cross_entropy.h"

namespace liger::trace {

ForwardWork trace_fused_loss(const LossCall& call, const LossPlan& plan, Recorder& recorder) {
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
  FusedLoss args;
  args.x = tensor({call.rows, call.hidden}, scalar_type(call.x));
  args.weight = tensor({call.vocab, call.hidden}, scalar_type(call.weight));
  args.target = tensor({call.rows}, ScalarType::Long);
  args.bias = vector(call.bias);
  args.ce_weight = vector(call.class_weight);
  if (call.temperature) args.temperature = tensor({call.rows}, scalar_type(accumulator(call.compute)));
  recorder.counts = true;
  args.reduction = int64_t(call.per_row ? Reduction::none : Reduction::mean);
  args.label_smoothing = call.label_smoothing ? 0.1 : 0;
  args.lse_square_scale = call.z_loss ? 1e-4 : 0;
  if (call.softcap) args.softcap = 30;
  args.use_token_scaling = call.token_scaling;
  args.return_z_loss = call.z_loss;
  args.return_token_accuracy = call.token_accuracy;
  args.return_predicted_tokens = call.predicted_tokens;
  args.return_entropy = args.return_mean_logits = args.return_log_sum_sq = call.moments;
  if (call.sum) args.accum_dtype = scalar_type(*call.sum);
  args.compute_dtype = scalar_type(call.compute);
  if (call.wide_logits) args.logits_dtype = scalar_type(accumulator(call.compute));
  args.gradients = int64_t(plan.gradients);
  args.chunk_rows = plan.rows;
  args.chunk_classes = plan.classes;
  args.need_dx = call.dx;
  args.need_dweight = call.dweight;
  args.need_dbias = call.dbias;

  const FusedLossResults results = fused_loss(args);
  const ForwardWork forward{recorder.kernels.size(), recorder.multiplications};
  if (plan.gradients == launch::Gradients::none) return forward;
  args.counts = results.counts;
  args.saved = results.saved;
  args.dx = results.dx;
  args.dweight = results.dweight;
  args.dbias = results.dbias;
  // Autograd passes the upstream gradient: one number, or a tensor with one number for each row.
  const ScalarType loss_type = scalar_type(accumulator(call.compute));
  args.dloss = call.per_row ? tensor({call.rows}, loss_type) : tensor({}, loss_type);
  const bool sums = plan.gradients == launch::Gradients::accumulated || plan.gradients == launch::Gradients::overlaid;
  fused_loss_gradients(args, call.in_place && sums && call.dweight);
  return forward;
}

}  // namespace liger::trace
