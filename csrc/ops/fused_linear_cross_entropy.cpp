#include "ops/fused_linear_cross_entropy.h"

#include "ops/cross_entropy_loss.h"
#include "ops/fused_linear.h"
#include "schemas.h"

namespace liger::LIGER_BACKEND {
namespace {

// The numbers from which the backward recomputes gradients of logits: the forward stores them behind the counts, in the same tensor.
OptionalTensor stored_gradient_state(const Tensor& counts) {
  const int64_t state_size = counts.numel() - CrossEntropyCounts::slots;
  return state_size > 0 ? OptionalTensor(narrow_view(counts, 0, CrossEntropyCounts::slots, state_size)) : OptionalTensor();
}

Schedule loss_schedule(const Head& head, const FusedLoss& a) {
  return build_schedule(head, a.need_dx, a.need_dweight, a.need_dbias, a.gradients, a.chunk_rows, a.chunk_classes);
}

}  // namespace

FusedLossResults fused_loss(const FusedLoss& a) {
  const Scope scope("fused_linear_cross_entropy", a.x);
  const CrossEntropyOptions options = loss_options(a);
  const Head head(scope, a.x, a.weight, a.bias, a.accum_dtype, a.compute_dtype, a.logits_dtype);
  const Schedule schedule = loss_schedule(head, a);

  const bool overlaid = schedule.gradients == Gradients::overlaid;
  const SavedTensors expected = saved_tensors(a, head_dtypes(scope.op(), a.x, a.weight, a.accum_dtype, a.compute_dtype, a.logits_dtype));
  const auto allocated = [&](const SavedTensor& t) { return allocate(scope, t.shape(), t.dtype, a.x); };
  const Tensor target = contiguous(scope, a.target);
  const OptionalTensor class_weight = contiguous(scope, a.ce_weight);
  const Counts counts = allocate_counts(scope, target, class_weight, a.normalizer, head.vocab, options, head.acc, expected.counts.sizes[0]);
  const CrossEntropyLoss loss(head, options, target, class_weight, {}, {a.temperature, {}, stored_gradient_state(counts.values)});
  cross_entropy_counts(counts.arguments, scope);
  LossRows losses(scope, a.x, head.rows, head.acc, a);
  const bool deferred = schedule.gradients == Gradients::deferred, accumulated = schedule.gradients == Gradients::accumulated;
  Schedule summed = schedule;  // the gradients that the forward sums
  summed.dx = !expected.dx.sizes.empty();
  summed.dweight = schedule.dweight && accumulated;
  summed.dbias = !expected.dbias.sizes.empty();
  const SumSizes<int64_t> sizes = head.sum_sizes();
  const GradientSums sums(head, summed, allocated(expected.dx), allocated(expected.dweight), allocated(expected.saved),
                          allocated(expected.dbias));
  const Tensor& saved = sums.rest;
  // The sum uses whole multiples of 64 rows; the end of the memory is unused.
  const int64_t whole = sizes.rows * head.hidden;
  if (summed.dweight && whole < sizes.memory) zero({narrow_view(sums.dweight, 0, whole, sizes.memory - whole)});
  if (deferred) zero({narrow_view(saved, 1, head.vocab, schedule.stride() - head.vocab)});
  if (overlaid) {
    const Overlaid gradient(head, schedule, sums.dweight, saved);
    gradient.make(loss, counts.values, &losses, stored_gradient_state(counts.values));
    if (summed.dx) gradient.input_gradient(sums.dx);
  } else if (head.rows > 0) {
    const bool wanted = deferred || accumulated;
    const ChunkBuffer buffer(head, schedule, wanted, deferred ? OptionalTensor(saved) : OptionalTensor());
    for_each_chunk(head, loss, schedule, buffer, counts.values, &losses, wanted, [&](Range rows, Range classes, const Rows& gradient) {
      const Rows x_rows = summed.dweight ? from_row(head.x_rows(), rows.first) : Rows{};
      sums.add(rows, classes, gradient, x_rows, {});
    });
  } else {
    zero({sums.dweight, saved, sums.dbias});
  }
  losses.finish(counts, true);
  return {losses.loss,
          losses.z_loss,
          losses.token_accuracy,
          losses.predicted_tokens,
          losses.entropy,
          losses.mean_logits,
          losses.log_sum_sq,
          counts.values,
          saved,
          sums.dx,
          sums.dweight,
          sums.dbias};
}

FusedLossGradients fused_loss_gradients(const FusedLoss& a, bool in_place) {
  const Scope scope(in_place ? "fused_linear_cross_entropy_backward_" : "fused_linear_cross_entropy_backward", a.x);
  const Head head(scope, a.x, a.weight, a.bias, a.accum_dtype, a.compute_dtype, a.logits_dtype);
  const CrossEntropyLoss loss(head, loss_options(a), a.target, a.ce_weight, {}, {a.temperature, a.mix, {}});
  const Schedule schedule = loss_schedule(head, a);
  if (in_place) {
    require_apart(scope, a.dweight, "dweight", a.x, "x");
    require_apart(scope, a.dweight, "dweight", a.weight, "weight");
    require_apart(scope, a.dweight, "dweight", a.saved, "saved");
  }

  Backward backward(head, schedule, a.x, a.bias, a.dloss, loss.per_row(), loss.scale(a.counts), 1 / loss.gradient_scale, in_place);
  backward.dweight = in_place ? a.dweight : allocate(scope, {0}, head.weight, a.x);
  if (head.rows == 0) {
    backward.zeros();
    return {backward.dx, backward.dweight, backward.dbias};
  }
  // The forward's sum of dx is of the loss alone, so it is not used with a.mix. A dx that the forward has not summed is not checked and
  // must not be read.
  const bool summed = schedule.dx && !a.mix && sums_dx(schedule.gradients, head.weight, head.compute, !schedule.cuts_vocabulary(head));
  const Tensor dx_sum = summed ? a.dx : allocate(scope, {0}, head.compute, a.x);
  switch (schedule.gradients) {
    case Gradients::none:
      break;
    case Gradients::deferred:
      backward.from_saved_gradient(a.saved, dx_sum);
      break;
    case Gradients::accumulated:
      backward.from_sums(a.dx, a.dweight, a.saved, a.dbias);
      break;
    case Gradients::recomputed:
      if (const OptionalTensor gradient_state = stored_gradient_state(a.counts))
        backward.by_recomputing(MergedLoss(loss, head, *gradient_state, schedule.rows), a.counts);
      else backward.by_recomputing(loss, a.counts);
      break;
    case Gradients::overlaid: {
      const CrossEntropyLoss::VocabularyChunks chunks(loss, head.all_rows(), 0, a.counts, nullptr, stored_gradient_state(a.counts));
      if (a.mix)
        Overlaid(head, schedule, a.dweight, a.saved).for_each_stored([&](Range classes, const MutableRows& gradient) {
          loss.mix_stored(classes, gradient, a.counts);
        });
      backward.from_overlaid(a.dweight, a.saved, dx_sum, [&](Range classes, const MutableRows& out) {
        if (head.wide_logits()) {
          const MergedLoss merged(loss, head, *stored_gradient_state(a.counts), schedule.rows);
          return for_each_wide_chunk(head, schedule.rows, classes, [&](Range rows, const MutableRows& logits) {
            merged.gradient(rows, classes, logits, a.counts);
            round_classes(head, rows, logits, {0, classes.count}, out);
          });
        }
        head.logits(head.all_rows(), classes, out);
        chunks.gradient(classes, out);
      });
    }
  }
  return {backward.dx, backward.dweight, backward.dbias};
}

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
