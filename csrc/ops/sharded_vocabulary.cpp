// The fused loss of a vocabulary that is sharded over processes: what each of them does, between the collectives of
// liger_ext/ops/_sharded_vocabulary.py. Each shard counts as a chunk of the vocabulary (kernels/cross_entropy.h).
//   statistics   the shard's, of all rows. Its logits are kept where all exist at once and their gradient is wanted.
//   [gather]
//   losses_      all shards' statistics, merged: the same for each process. Logits that were kept become their gradient.
//   backward     the shard's dweight and dbias, and its term of dx: from the gradient that was kept, or, chunk by chunk, from logits made
//                again.
//   [sum of dx]
#include "checks/sharded_vocabulary.h"
#include "ops/cross_entropy_loss.h"
#include "ops/fused_linear.h"

namespace liger::LIGER_BACKEND {
namespace {

using StatisticsResult = std::tuple<Tensor, Tensor, Tensor>;

StatisticsResult statistics_op(Tensor x, Tensor weight, Tensor target, OptionalTensor bias, OptionalTensor ce_weight, int64_t ignore_index,
                               double label_smoothing, std::optional<double> softcap, std::optional<ScalarType> accum_dtype,
                               std::optional<ScalarType> compute_dtype, int64_t first_class, int64_t vocab_size, int64_t chunk_rows,
                               bool predictions, bool keep_logits) {
  constexpr int64_t slots = CrossEntropyStatistics::slots;
  const Scope scope("vocabulary_shard_statistics", x);
  const Head head(scope, x, weight, bias, accum_dtype, compute_dtype);
  const CrossEntropyLoss loss(head, options_of(ignore_index, 0, label_smoothing, 0, softcap), target, ce_weight,
                              Classes{first_class, vocab_size});
  const Schedule schedule = schedule_of(head, false, false, false, int64_t(Gradients::none), chunk_rows, head.vocab);
  const Tensor nothing = allocate(scope, {0}, head.compute, x);
  const Tensor statistics = allocate(scope, {1, slots, head.rows}, head.acc, x);
  Tensor best_class = allocate(scope, {predictions ? 1 : 0, head.rows}, ScalarType::Long, x);
  const Tensor logits = allocate(scope, {keep_logits ? head.rows : schedule.rows, head.vocab}, {schedule.stride(), 1}, head.compute, x);
  const Tensor of_chunk = allocate(scope, {slots, schedule.rows}, head.acc, x);

  for (int64_t first = 0; first < head.rows; first += schedule.rows) {
    const Range rows{first, std::min(schedule.rows, head.rows - first)};
    const MutableRows made{logits.data_ptr(), schedule.stride(), head.compute};
    head.logits(rows, head.all_classes(), made);
    CrossEntropyLoss::VocabularyChunks(loss, rows, 1, nothing, nullptr, nothing, of_chunk, part_of(best_class, 1, first, rows.count))
        .statistics(0, head.all_classes(), made);
    copy_values(head, slots, rows.count, of_chunk.data_ptr(), rows.count, at(statistics.data_ptr(), first, head.acc), head.rows);
  }
  return {keep_logits ? logits : nothing, statistics, best_class};
}

using LossesResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

LossesResult losses_op(Tensor logits, Tensor statistics, Tensor best_class, Tensor x, Tensor weight, Tensor target,
                       OptionalTensor ce_weight, OptionalTensor normalizer, int64_t ignore_index, int64_t reduction, double label_smoothing,
                       double lse_square_scale, std::optional<double> softcap, bool use_token_scaling, bool return_z_loss,
                       bool return_token_accuracy, bool return_predicted_tokens, std::optional<ScalarType> compute_dtype,
                       int64_t first_class, int64_t vocab_size) {
  const Scope scope("vocabulary_shard_losses_", x);
  const CrossEntropyOptions options = options_of(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling);
  const Head head(scope, x, weight, {}, {}, compute_dtype);
  const CrossEntropyLoss loss(head, options, target, ce_weight, Classes{first_class, vocab_size});
  const Counts counts = counts_of(scope, loss.target, loss.class_weight, normalizer, vocab_size, options, head.acc);
  cross_entropy_counts(counts.how, scope);
  LossRows losses(scope, x, head.rows, head.acc, options, return_z_loss, return_token_accuracy, return_predicted_tokens);
  const Tensor kept = allocate(scope, {launch::kept_for_gradients(head.rows, use_token_scaling)}, head.acc, x);
  if (head.rows > 0) {
    const CrossEntropyLoss::VocabularyChunks shards(loss, head.all_rows(), statistics.size(0), counts.values, &losses, kept, statistics,
                                                    best_class);
    shards.merge(statistics.size(0));
    if (logits.numel() > 0) shards.gradient(head.all_classes(), {logits.data_ptr(), logits.stride(0), head.compute});
  }
  losses.finish(counts, true);
  return {losses.loss, losses.z_loss, losses.token_accuracy, losses.predicted_tokens, counts.values, kept};
}

using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

BackwardResult backward_op(Tensor dloss, Tensor x, Tensor weight, Tensor target, OptionalTensor bias, OptionalTensor ce_weight,
                           Tensor counts, Tensor kept, Tensor saved, int64_t ignore_index, int64_t reduction, double label_smoothing,
                           double lse_square_scale, std::optional<double> softcap, bool use_token_scaling,
                           std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype, int64_t first_class,
                           int64_t vocab_size, int64_t chunk_rows, bool need_dx, bool need_dweight, bool need_dbias) {
  const Scope scope("vocabulary_shard_backward", x);
  const Head head(scope, x, weight, bias, accum_dtype, compute_dtype);
  Schedule schedule = schedule_of(head, need_dx, need_dweight, need_dbias, int64_t(Gradients::recomputed), chunk_rows, head.vocab);
  schedule.dx_is_term = true;
  const CrossEntropyOptions options = options_of(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling);
  const MergedLoss loss(CrossEntropyLoss(head, options, target, ce_weight, Classes{first_class, vocab_size}), head, kept, schedule.rows);
  Backward backward(head, schedule, x, bias, dloss, loss.per_row(), loss.scale(counts), 1 / loss.gradient_scale, false);
  backward.dweight = allocate(scope, {0}, head.weight, x);
  if (head.rows == 0) backward.zeros();
  else if (saved.numel() > 0) backward.from_saved_gradient(saved, allocate(scope, {0}, head.compute, x));
  else backward.by_recomputing(loss, counts);
  return {backward.dx, backward.dweight, backward.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("vocabulary_shard_statistics", boxed<statistics_op, check_vocabulary_shard_statistics>);
  m.impl("vocabulary_shard_losses_", boxed<losses_op, check_vocabulary_shard_losses>);
  m.impl("vocabulary_shard_backward", boxed<backward_op, check_vocabulary_shard_backward>);
}

}  // namespace liger::LIGER_BACKEND
