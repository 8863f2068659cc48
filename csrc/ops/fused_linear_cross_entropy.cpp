// The language-model head and cross entropy as one op: fused_linear.h says how.
#include "checks/fused_linear_cross_entropy.h"
#include "ops/cross_entropy_loss.h"
#include "ops/fused_linear.h"

namespace liger::LIGER_BACKEND {
namespace {

using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

ForwardResult forward_op(Tensor x, Tensor weight, Tensor target, OptionalTensor bias, OptionalTensor ce_weight, OptionalTensor normalizer,
                         int64_t ignore_index, int64_t reduction, double label_smoothing, double lse_square_scale,
                         std::optional<double> softcap, bool use_token_scaling, bool return_z_loss, bool return_token_accuracy,
                         bool return_predicted_tokens, std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype,
                         int64_t gradients, int64_t chunk_rows, int64_t chunk_classes, bool need_dx, bool need_dweight, bool need_dbias) {
  const Scope scope("fused_linear_cross_entropy", x);
  const CrossEntropyOptions options = options_of(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling);
  const Head head(scope, x, weight, bias, accum_dtype, compute_dtype);
  const CrossEntropyLoss loss(head, options, target, ce_weight);
  const Schedule schedule = schedule_of(head, need_dx, need_dweight, need_dbias, gradients, chunk_rows, chunk_classes);

  const Counts counts = counts_of(scope, loss.target, loss.class_weight, normalizer, head.vocab, options, head.acc);
  cross_entropy_counts(counts.how, scope);
  LossRows losses(scope, x, head.rows, head.acc, options, return_z_loss, return_token_accuracy, return_predicted_tokens);
  const bool deferred = schedule.gradients == Gradients::deferred, accumulated = schedule.gradients == Gradients::accumulated;
  const Tensor saved =
      deferred ? allocate(scope, {head.rows, head.vocab}, {schedule.stride(), 1}, head.compute, x) : allocate(scope, {0}, head.compute, x);
  const GradientSums sums(head, schedule, accumulated);

  if (head.rows > 0) {
    const Tensor buffer = deferred ? saved : allocate(scope, {schedule.rows, schedule.stride()}, head.compute, x);
    const MutableRows logits{buffer.data_ptr(), schedule.stride(), head.compute};
    for_each_chunk(head, loss, schedule, logits, counts.values, &losses, deferred || accumulated,
                   [&](Range rows, Range classes, const Rows& gradient) {
                     if (!accumulated) return;
                     const Rows x_rows = schedule.dweight ? from_row(head.x_rows(), rows.first) : Rows{};
                     sums.add(rows, classes, gradient, x_rows, {});
                   });
  } else {
    zero({sums.dweight, sums.dbias});
  }
  losses.finish(counts, true);
  return {losses.loss,  losses.z_loss, losses.token_accuracy, losses.predicted_tokens, counts.values, saved, sums.dx,
          sums.dweight, sums.dbias};
}

std::tuple<Tensor, Tensor, Tensor> backward_op(Tensor dloss, Tensor x, Tensor weight, Tensor target, OptionalTensor bias,
                                               OptionalTensor ce_weight, Tensor counts, Tensor saved, Tensor dx, Tensor dweight,
                                               Tensor dbias, int64_t ignore_index, int64_t reduction, double label_smoothing,
                                               double lse_square_scale, std::optional<double> softcap, bool use_token_scaling,
                                               std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype,
                                               int64_t gradients, int64_t chunk_rows, int64_t chunk_classes, bool need_dx,
                                               bool need_dweight, bool need_dbias) {
  const Scope scope("fused_linear_cross_entropy_backward", x);
  const CrossEntropyOptions options = options_of(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling);
  const Head head(scope, x, weight, bias, accum_dtype, compute_dtype);
  const CrossEntropyLoss loss(head, options, target, ce_weight);
  const Schedule schedule = schedule_of(head, need_dx, need_dweight, need_dbias, gradients, chunk_rows, chunk_classes);

  Backward backward(head, schedule, x, weight, bias, dloss, loss.per_row(), loss.scale(counts), 1 / loss.gradient_scale);
  if (head.rows == 0) {
    backward.zeros();
    return {backward.dx, backward.dweight, backward.dbias};
  }
  switch (schedule.gradients) {
    case Gradients::none:
      break;
    case Gradients::deferred:
      backward.from_saved_gradient(saved);
      break;
    case Gradients::accumulated:
      backward.from_sums(dx, dweight, dbias);
      break;
    case Gradients::recomputed:
      backward.by_recomputing(loss, counts);
      break;
  }
  return {backward.dx, backward.dweight, backward.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("fused_linear_cross_entropy", boxed<forward_op, check_fused_linear_cross_entropy>);
  m.impl("fused_linear_cross_entropy_backward", boxed<backward_op, check_fused_linear_cross_entropy_backward>);
}

}  // namespace liger::LIGER_BACKEND
