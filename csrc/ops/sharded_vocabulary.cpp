// The fused loss of a vocabulary that is sharded over processes: the ops that each process runs. [gather] and [sum of dx] are the
// collectives between them, in liger_ext/ops/_sharded_vocabulary.py. Each shard counts as a chunk of the vocabulary
// (kernels/cross_entropy.h).
//   statistics   Computes the shard's statistics, of all rows. With keep_logits it also returns the shard's logits of all rows, which must
//                have the matmuls' dtype.
//   [gather]
//   losses_      Merges all shards' statistics into losses, the same in each process. Overwrites the logits that statistics returned by
//                their gradient.
//   backward     Computes the shard's dweight and dbias, and its term of dx: from the gradient that losses_ stored, or from logits that it
//                recomputes chunk by chunk. For a gradient of the entropy it recomputes the logits.
//   backward_    As backward, for a gradient of the entropy: overwrites the stored gradient by the gradient that includes the entropy's.
//   [sum of dx]
#include "checks/sharded_vocabulary.h"

#include "ops/cross_entropy_loss.h"
#include "ops/fused_linear.h"
#include "ops/fused_linear_cross_entropy.h"
#include "schemas.h"

namespace liger::LIGER_BACKEND {
namespace {

CrossEntropyLoss shard_loss(const Head& head, const VocabularyShard& a) {
  return CrossEntropyLoss(head, loss_options(a), a.target, a.ce_weight, Classes{a.first_class, a.vocab_size},
                          {a.temperature, a.mix, {}, a.wants_moments()});
}

using StatisticsResult = std::tuple<Tensor, Tensor, Tensor>;

StatisticsResult statistics_op(const VocabularyShard& a) {
  const Scope scope("vocabulary_shard_statistics", a.x);
  const Head head(scope, a.x, a.weight, a.bias, a.accum_dtype, a.compute_dtype, a.logits_dtype);
  const CrossEntropyLoss loss = shard_loss(head, a);
  const Schedule schedule = build_schedule(head, false, false, false, int64_t(Gradients::none), a.chunk_rows, head.vocab);
  const int64_t slots = CrossEntropyStatistics::slot_count(a.wants_moments());
  const Tensor nothing = allocate(scope, {0}, head.compute, a.x);
  const Tensor statistics = allocate(scope, {1, slots, head.rows}, head.acc, a.x);
  Tensor best_class = allocate(scope, {a.predictions ? 1 : 0, head.rows}, ScalarType::Long, a.x);
  const Tensor logits =
      allocate(scope, {a.keep_logits ? head.rows : schedule.rows, head.vocab}, {schedule.stride(), 1}, head.logits_dtype, a.x);
  const Tensor chunk_statistics = allocate(scope, {slots, schedule.rows}, head.acc, a.x);

  for (int64_t first = 0; first < head.rows; first += schedule.rows) {
    const Range rows{first, std::min(schedule.rows, head.rows - first)};
    const MutableRows chunk_logits{logits.data_ptr(), schedule.stride(), head.logits_dtype};
    head.logits(rows, head.all_classes(), chunk_logits);
    CrossEntropyLoss::VocabularyChunks(loss, rows, 1, nothing, nullptr, nothing, chunk_statistics,
                                       narrow_view(best_class, 1, first, rows.count))
        .statistics(0, head.all_classes(), chunk_logits);
    copy_values(head, slots, rows.count, chunk_statistics.data_ptr(), rows.count, at(statistics.data_ptr(), first, head.acc), head.rows);
  }
  return {a.keep_logits ? logits : nothing, statistics, best_class};
}

using LossesResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

LossesResult losses_op(const VocabularyShard& a) {
  const Scope scope("vocabulary_shard_losses_", a.x);
  const Head head(scope, a.x, a.weight, {}, {}, a.compute_dtype, {});
  const CrossEntropyLoss loss = shard_loss(head, a);
  const Counts counts = allocate_counts(scope, loss.target, loss.class_weight, a.normalizer, a.vocab_size, loss.options, head.acc);
  cross_entropy_counts(counts.arguments, scope);
  LossRows losses(scope, a.x, head.rows, head.acc, a);
  const Tensor gradient_state = allocate(scope, {launch::gradient_state_size(head.rows, a.use_token_scaling)}, head.acc, a.x);
  if (head.rows > 0) {
    const int64_t count = a.statistics.size(0);
    const CrossEntropyLoss::VocabularyChunks shards(loss, head.all_rows(), count, counts.values, &losses, gradient_state, a.statistics,
                                                    a.best_class);
    shards.merge(count);
    if (a.logits.numel() > 0) shards.gradient(head.all_classes(), {a.logits.data_ptr(), a.logits.stride(0), head.compute});
  }
  losses.finish(counts, true);
  return {losses.loss,        losses.z_loss,     losses.token_accuracy, losses.predicted_tokens, losses.entropy,
          losses.mean_logits, losses.log_sum_sq, counts.values,         gradient_state};
}

using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

BackwardResult backward_op(const VocabularyShard& a) {
  const Scope scope("vocabulary_shard_backward", a.x);
  const Head head(scope, a.x, a.weight, a.bias, a.accum_dtype, a.compute_dtype, a.logits_dtype);
  Schedule schedule =
      build_schedule(head, a.need_dx, a.need_dweight, a.need_dbias, int64_t(Gradients::recomputed), a.chunk_rows, head.vocab);
  schedule.dx_is_term = true;
  const MergedLoss loss(shard_loss(head, a), head, a.gradient_state, schedule.rows);
  Backward backward(head, schedule, a.x, a.bias, a.dloss, loss.per_row(), loss.scale(a.counts), 1 / loss.gradient_scale, false);
  backward.dweight = allocate(scope, {0}, head.weight, a.x);
  if (head.rows == 0) backward.zeros();
  else if (a.saved.numel() == 0) backward.by_recomputing(loss, a.counts);
  else {
    if (a.mix) loss.mix_stored(head.all_classes(), {a.saved.data_ptr(), a.saved.stride(0), head.compute}, a.counts);
    backward.from_saved_gradient(a.saved, allocate(scope, {0}, head.compute, a.x));
  }
  return {backward.dx, backward.dweight, backward.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("vocabulary_shard_statistics", boxed<statistics_op, check_vocabulary_shard_statistics, schemas::vocabulary_shard_statistics>);
  m.impl("vocabulary_shard_losses_", boxed<losses_op, check_vocabulary_shard_losses, schemas::vocabulary_shard_losses_>);
  m.impl("vocabulary_shard_backward", boxed<backward_op, check_vocabulary_shard_backward, schemas::vocabulary_shard_backward>);
  m.impl("vocabulary_shard_backward_", boxed<backward_op, check_vocabulary_shard_backward_in_place, schemas::vocabulary_shard_backward_>);
}

}  // namespace liger::LIGER_BACKEND
