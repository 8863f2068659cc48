// The language-model head and cross entropy as one op: fused_linear.h says how.
#include "checks/fused_linear_cross_entropy.h"
#include "ops/cross_entropy_loss.h"
#include "ops/fused_linear.h"

namespace liger::LIGER_BACKEND {
namespace {

// What stands behind the counts: what the backward needs to make gradients of logits again.
OptionalTensor kept_of(const Tensor& counts) {
  const int64_t kept = counts.numel() - CrossEntropyCounts::slots;
  Tensor all = counts;
  return kept > 0 ? OptionalTensor(torch::stable::narrow(all, 0, CrossEntropyCounts::slots, kept)) : OptionalTensor();
}

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

  const bool overlaid = schedule.gradients == Gradients::overlaid;
  const int64_t kept = overlaid && schedule.classes < head.vocab ? launch::kept_for_gradients(head.rows, use_token_scaling) : 0;
  const Counts counts = counts_of(scope, loss.target, loss.class_weight, normalizer, head.vocab, options, head.acc, kept);
  cross_entropy_counts(counts.how, scope);
  LossRows losses(scope, x, head.rows, head.acc, options, return_z_loss, return_token_accuracy, return_predicted_tokens);
  const auto way = schedule.gradients;
  const bool deferred = way == Gradients::deferred, accumulated = way == Gradients::accumulated;
  const bool sums_weight = accumulated && schedule.dweight;
  const SumSizes<int64_t> sizes = head.sum_sizes();
  Tensor memory = overlaid ? allocate(scope, {head.vocab * head.hidden}, head.weight, x)
                           : allocate(scope, {sums_weight ? sizes.memory : 0}, head.sum, x);
  // Less than 64 rows are left at the end.
  const int64_t summed = sizes.rows * head.hidden;
  if (sums_weight && summed < sizes.memory) zero({torch::stable::narrow(memory, 0, summed, sizes.memory - summed)});
  GradientSums sums(head, schedule, accumulated, memory);
  Tensor& saved = sums.rest;
  if (deferred) {
    saved = allocate(scope, {head.rows, schedule.stride()}, head.compute, x);
    zero({torch::stable::narrow(saved, 1, head.vocab, schedule.stride() - head.vocab)});
  }
  if (overlaid) {
    saved = allocate(scope, {launch::overlaid_rest(head.rows, head.hidden, head.vocab, schedule.classes)}, head.compute, x);
    Overlaid(head, schedule, sums.dweight, saved).make(loss, counts.values, &losses, kept_of(counts.values));
  } else if (head.rows > 0) {
    const Tensor buffer = deferred ? saved : allocate(scope, {schedule.rows, schedule.stride()}, head.compute, x);
    const MutableRows logits{buffer.data_ptr(), schedule.stride(), head.compute};
    for_each_chunk(head, loss, schedule, logits, counts.values, &losses, deferred || accumulated,
                   [&](Range rows, Range classes, const Rows& gradient) {
                     if (!accumulated) return;
                     const Rows x_rows = schedule.dweight ? from_row(head.x_rows(), rows.first) : Rows{};
                     sums.add(rows, classes, gradient, x_rows, {});
                   });
  } else {
    zero({sums.dweight, saved, sums.dbias});
  }
  losses.finish(counts, true);
  return {losses.loss,  losses.z_loss, losses.token_accuracy, losses.predicted_tokens, counts.values, saved, sums.dx,
          sums.dweight, sums.dbias};
}

using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

BackwardResult backward_of(const char* op, bool in_place, const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
                           const OptionalTensor& bias, const OptionalTensor& ce_weight, const Tensor& counts, const Tensor& saved,
                           const Tensor& dx, const Tensor& dweight, const Tensor& dbias, const CrossEntropyOptions& options,
                           std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype, int64_t gradients,
                           int64_t chunk_rows, int64_t chunk_classes, bool need_dx, bool need_dweight, bool need_dbias) {
  const Scope scope(op, x);
  const Head head(scope, x, weight, bias, accum_dtype, compute_dtype);
  const CrossEntropyLoss loss(head, options, target, ce_weight);
  const Schedule schedule = schedule_of(head, need_dx, need_dweight, need_dbias, gradients, chunk_rows, chunk_classes);
  if (in_place) {
    require_apart(scope, dweight, "dweight", x, "x");
    require_apart(scope, dweight, "dweight", weight, "weight");
    require_apart(scope, dweight, "dweight", saved, "saved");
  }

  Backward backward(head, schedule, x, bias, dloss, loss.per_row(), loss.scale(counts), 1 / loss.gradient_scale, in_place);
  backward.dweight = in_place ? dweight : allocate(scope, {0}, head.weight, x);
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
      backward.from_sums(dx, dweight, saved, dbias);
      break;
    case Gradients::recomputed:
      backward.by_recomputing(loss, counts);
      break;
    case Gradients::overlaid: {
      const CrossEntropyLoss::VocabularyChunks chunks(loss, head.all_rows(), 0, counts, nullptr, kept_of(counts));
      backward.from_overlaid(dweight, saved, [&](Range classes, const MutableRows& out) {
        head.logits(head.all_rows(), classes, out);
        chunks.gradient(classes, out);
      });
    }
  }
  return {backward.dx, backward.dweight, backward.dbias};
}

BackwardResult backward_op(Tensor dloss, Tensor x, Tensor weight, Tensor target, OptionalTensor bias, OptionalTensor ce_weight,
                           Tensor counts, Tensor saved, Tensor dx, Tensor dweight, Tensor dbias, int64_t ignore_index, int64_t reduction,
                           double label_smoothing, double lse_square_scale, std::optional<double> softcap, bool use_token_scaling,
                           std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype, int64_t gradients,
                           int64_t chunk_rows, int64_t chunk_classes, bool need_dx, bool need_dweight, bool need_dbias) {
  return backward_of("fused_linear_cross_entropy_backward", false, dloss, x, weight, target, bias, ce_weight, counts, saved, dx, dweight,
                     dbias, options_of(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling), accum_dtype,
                     compute_dtype, gradients, chunk_rows, chunk_classes, need_dx, need_dweight, need_dbias);
}

std::tuple<Tensor, Tensor> backward_in_place_op(Tensor dweight, Tensor saved, Tensor dloss, Tensor x, Tensor weight, Tensor target,
                                                OptionalTensor bias, OptionalTensor ce_weight, Tensor counts, Tensor dx, Tensor dbias,
                                                int64_t ignore_index, int64_t reduction, double label_smoothing, double lse_square_scale,
                                                std::optional<double> softcap, bool use_token_scaling,
                                                std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype,
                                                int64_t gradients, int64_t chunk_rows, int64_t chunk_classes, bool need_dx,
                                                bool need_dweight, bool need_dbias) {
  const auto [new_dx, _, new_dbias] =
      backward_of("fused_linear_cross_entropy_backward_", true, dloss, x, weight, target, bias, ce_weight, counts, saved, dx, dweight,
                  dbias, options_of(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling), accum_dtype,
                  compute_dtype, gradients, chunk_rows, chunk_classes, need_dx, need_dweight, need_dbias);
  return {new_dx, new_dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("fused_linear_cross_entropy", boxed<forward_op, check_fused_linear_cross_entropy>);
  m.impl("fused_linear_cross_entropy_backward", boxed<backward_op, check_fused_linear_cross_entropy_backward>);
  m.impl("fused_linear_cross_entropy_backward_", boxed<backward_in_place_op, check_fused_linear_cross_entropy_backward_in_place>);
}

}  // namespace liger::LIGER_BACKEND
