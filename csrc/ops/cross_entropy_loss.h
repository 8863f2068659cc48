// CrossEntropyLoss: the template argument Loss of fused_linear.h for cross entropy. It computes losses from rows of logits, and overwrites
// the logits by their gradient. The rows are whole, or come in chunks of the vocabulary. The head's classes may be a shard of a larger
// vocabulary; the shard then counts as one of that vocabulary's chunks (sharded_vocabulary.cpp).
#pragma once
#include "launch/chunks.h"
#include "ops/head.h"
#include "ops/loss.h"

namespace liger::LIGER_BACKEND {

// Copies `values` numbers per row between a matrix [values, rows of a chunk] and a matrix [values, all rows].
inline void copy_values(const Head& head, int64_t values, int64_t rows, const void* from, int64_t from_stride, void* to,
                        int64_t to_stride) {
  scale_cast({values, rows, {from, from_stride, head.acc}, {to, to_stride, head.acc}, nullptr, {}}, head.scope);
}

// Further tensors, each for all rows and each optional. Of log-probabilities: the temperatures, and `mix`, the gradient of the entropy
// (CrossEntropyBackward::mix). gradient_state: memory in which the forward saves log-sum-exps for the backward. moments: true if the
// statistics include moments, even if no result that needs them is requested.
struct LogProbs {
  OptionalTensor temperature, mix, gradient_state;
  bool moments = false;
};

class CrossEntropyLoss {
 public:
  using Results = LossRows;

  // class_weight: of the whole vocabulary.
  CrossEntropyLoss(const Head& head, const CrossEntropyOptions& options, const Tensor& target, const OptionalTensor& class_weight,
                   std::optional<Classes> shard = {}, const LogProbs& log_probs = {})
      : options(options),
        target(contiguous(head.scope, target)),
        class_weight(contiguous(head.scope, class_weight)),
        gradient_scale(head.compute == Dtype::f16 ? 64.0 : 1.0),
        head_(head),
        log_probs_(log_probs),
        shard_(shard.value_or(Classes{0, head.vocab})) {}

  // The functions below overwrite logits by gradients without scale. The caller multiplies them by *scale() / gradient_scale and by
  // grad_output: one number, or one per row.
  bool per_row() const { return options.reduction == Reduction::none; }
  const void* scale(const Tensor& counts) const { return at(counts.data_ptr(), CrossEntropyCounts::scale, head_.acc); }

  // Processes whole rows of logits: stores their losses in `results` (unless null), and overwrites them by their gradient if `gradient`.
  void whole(Range rows, const MutableRows& logits, const Tensor& counts, const LossRows* results, bool gradient) const {
    if (by_statistics(results)) {
      if (gradient && results && in_chunks(rows, {{0, logits}}, head_.vocab, nullptr, counts, results, {})) return;
      const VocabularyChunks row(*this, rows, 1, counts, results);
      row.statistics(0, head_.all_classes(), logits);
      row.merge(1);
      if (gradient) row.gradient(head_.all_classes(), logits);
      return;
    }
    CrossEntropyRows args = row_args(rows, head_.all_classes(), logits, counts);
    if (results) results->point(args, rows.first);
    if (gradient) cross_entropy_in_place({args, gradient_scale, head_.rows}, head_.scope);
    else cross_entropy_forward(args, head_.scope);
  }

  // The same for rows that lie in several matrices, one for each chunk of the first `classes` classes, in their order. Returns false, and
  // does nothing, if no kernel takes them. If the vocabulary has other classes: `others` are their statistics, and `gradient_state` the
  // memory for the numbers from which the backward recomputes their gradient (VocabularyChunks).
  bool in_chunks(Range rows, const std::vector<LogitsChunk>& chunks, int64_t classes, const void* others, const Tensor& counts,
                 const LossRows* results, const OptionalTensor& gradient_state) const {
    CrossEntropyRows args = row_args(rows, {0, classes}, {}, counts);
    args.logits.dtype = chunks.front().logits.dtype;
    if (results) results->point(args, rows.first);
    CrossEntropyInChunks op{args, head_.vocab, others, gradient_scale, head_.rows, chunks.data(), int(chunks.size())};
    if (!cross_entropy_takes_chunks(op, head_.scope)) return false;
    const bool all_rows_saved = gradient_state || !log_probs_.gradient_state || rows.count == head_.rows;
    const OptionalTensor& lse = gradient_state ? gradient_state : log_probs_.gradient_state;
    const OptionalTensor rows_lse = all_rows_saved ? lse : OptionalTensor(allocate(head_.scope, {2, rows.count}, head_.acc, target));
    op.row.lse = rows_lse ? rows_lse->data_ptr() : nullptr;
    cross_entropy_in_chunks(op, head_.scope);
    if (!all_rows_saved) keep(*rows_lse, rows);
    return true;
  }

  // Rows whose logits come in chunks of the vocabulary. Call statistics() for each chunk, then merge(), which computes the losses, then
  // gradient() for each chunk.
  class VocabularyChunks {
   public:
    // chunks: the largest number of chunks. gradient_state: the numbers per row that merge() stores and gradient() reads; a caller of
    // gradient() alone passes them. statistics, best_class: likewise the input of merge() (kernels/cross_entropy.h). Tensors that are not
    // passed are allocated here.
    VocabularyChunks(const CrossEntropyLoss& loss, Range rows, int64_t chunks, const Tensor& counts, const LossRows* results,
                     const OptionalTensor& gradient_state = {}, const OptionalTensor& statistics = {},
                     const OptionalTensor& best_class = {})
        : loss_(loss), rows_(rows), counts_(counts), results_(loss.row_args(rows, {0, loss.shard_.all}, {}, counts)) {
      if (results) results->point(results_, rows.first);
      const bool predictions = results_.accuracy || results_.predicted;
      const Head& head = loss.head_;
      statistics_ = statistics ? *statistics : allocate(head.scope, {chunks, slots(), rows.count}, head.acc, loss.target);
      best_class_ = best_class ? *best_class : allocate(head.scope, {predictions ? chunks : 0, rows.count}, ScalarType::Long, loss.target);
      gradient_state_ = gradient_state ? *gradient_state
                                       : allocate(head.scope, {launch::gradient_state_size(rows.count, loss.options.token_scaling)},
                                                  head.acc, loss.target);
      owns_state_ = !gradient_state && results;
      results_.lse = gradient_state_.data_ptr();
    }

    void statistics(int64_t chunk, Range classes, const MutableRows& logits) const {
      cross_entropy_statistics(
          {loss_.row_args(rows_, in_vocabulary(classes), logits, counts_), vocabulary_range(classes),
           const_cast<void*>(chunk_statistics(chunk)), best_classes() ? best_classes() + chunk * rows_.count : nullptr, moments()},
          loss_.head_.scope);
    }
    const void* chunk_statistics(int64_t chunk) const { return at(statistics_.data_ptr(), chunk * slots() * rows_.count, loss_.head_.acc); }
    void merge(int64_t chunks) const {
      const Head& head = loss_.head_;
      cross_entropy_merge({results_, chunks, statistics_.data_ptr(), best_classes(), head.acc, token()}, head.scope);
      if (owns_state_ && loss_.log_probs_.gradient_state) loss_.keep(gradient_state_, rows_);
    }
    void gradient(Range classes, const MutableRows& logits) const {
      CrossEntropyBackward args = backward_args(loss_.row_args(rows_, in_vocabulary(classes), logits, counts_), gradient_state_, logits);
      args.classes = vocabulary_range(classes);
      args.token = token();
      args.gradient_scale = loss_.gradient_scale;
      if (const OptionalTensor& mix = loss_.log_probs_.mix) args.mix = at(mix->data_ptr(), 4 * rows_.first, loss_.head_.acc);
      cross_entropy_backward(args, loss_.head_.scope);
    }

   private:
    Range in_vocabulary(Range classes) const { return {loss_.shard_.first + classes.first, classes.count}; }
    Classes vocabulary_range(Range classes) const { return {in_vocabulary(classes).first, loss_.shard_.all}; }
    bool moments() const { return loss_.log_probs_.moments || results_.moments(); }
    int64_t slots() const { return CrossEntropyStatistics::slot_count(moments()); }
    int64_t* best_classes() const { return best_class_.numel() ? static_cast<int64_t*>(best_class_.data_ptr()) : nullptr; }
    void* token() const { return loss_.options.token_scaling ? at(gradient_state_.data_ptr(), 2 * rows_.count, loss_.head_.acc) : nullptr; }

    const CrossEntropyLoss& loss_;
    Range rows_;
    const Tensor& counts_;
    CrossEntropyRows results_;
    Tensor statistics_, best_class_, gradient_state_;
    bool owns_state_;  // gradient_state_ was allocated here by a forward, for these rows alone
  };

  // Replaces the stored gradient of all rows' logits of some classes by the gradient with LogProbs::mix. There must be no softcap.
  void mix_stored(Range classes, const MutableRows& gradient, const Tensor& counts) const {
    const Range in_vocabulary{shard_.first + classes.first, classes.count};
    CrossEntropyBackward args = backward_args(row_args(head_.all_rows(), in_vocabulary, gradient, counts), *log_probs_.mix, gradient);
    args.lse = nullptr;
    args.classes = {in_vocabulary.first, shard_.all};
    args.gradient_scale = gradient_scale;
    args.mix = log_probs_.mix->data_ptr();
    args.stored = true;
    cross_entropy_backward(args, head_.scope);
  }

  const CrossEntropyOptions options;
  const Tensor target;
  const OptionalTensor class_weight;
  // The factor of stored gradients: fp16 cannot represent numbers below 6e-8.
  const double gradient_scale;

 private:
  // Returns whether losses need statistics: the kernels for whole rows have no temperatures, no logit_scale and no moments.
  bool by_statistics(const LossRows* results) const {
    return log_probs_.temperature || options.logit_scale != 1 || (results && results->arguments.wants_moments());
  }
  // Copies the log-sum-exps of a chunk's rows into LogProbs::gradient_state.
  void keep(const Tensor& rows_lse, Range rows) const {
    copy_values(head_, 2, rows.count, rows_lse.data_ptr(), rows.count, at(log_probs_.gradient_state->data_ptr(), rows.first, head_.acc),
                head_.rows);
  }
  // classes: numbered in the whole vocabulary.
  CrossEntropyRows row_args(Range rows, Range classes, const MutableRows& logits, const Tensor& counts) const {
    CrossEntropyRows args{};
    args.rows = rows.count;
    args.vocab = classes.count;
    args.first_row = rows.first;
    args.logits = readable(logits);
    args.target = static_cast<const int64_t*>(target.data_ptr()) + rows.first;
    args.class_weight = as_vector(class_weight);
    args.class_weight.data = at(args.class_weight.data, classes.first, head_.acc);
    args.counts = counts.data_ptr();
    if (log_probs_.temperature) args.temperature = at(log_probs_.temperature->data_ptr(), rows.first, head_.acc);
    args.options = options;
    args.op = "fused_linear_cross_entropy";
    return args;
  }

  const Head& head_;
  const LogProbs log_probs_;
  const Classes shard_;
};

// The loss in a backward that recomputes logits: overwrites them by their gradient. gradient_state: the numbers of all rows that the
// forward saved (VocabularyChunks).
class MergedLoss : public CrossEntropyLoss {
 public:
  MergedLoss(const CrossEntropyLoss& loss, const Head& head, const Tensor& gradient_state, int64_t chunk_rows)
      : CrossEntropyLoss(loss),
        head_(head),
        values_(launch::gradient_state_size(int64_t{1}, options.token_scaling)),
        gradient_state_(gradient_state),
        chunk_state_(allocate(head.scope, {values_, chunk_rows}, head.acc, target)) {}

  void whole(Range rows, const MutableRows& logits, const Tensor& counts, const LossRows*, bool) const {
    gradient(rows, head_.all_classes(), logits, counts);
  }
  // The same for logits of some classes.
  void gradient(Range rows, Range classes, const MutableRows& logits, const Tensor& counts) const {
    copy_values(head_, values_, rows.count, at(gradient_state_.data_ptr(), rows.first, head_.acc), head_.rows, chunk_state_.data_ptr(),
                rows.count);
    VocabularyChunks(*this, rows, 0, counts, nullptr, chunk_state_).gradient(classes, logits);
  }

 private:
  const Head& head_;
  const int64_t values_;
  const Tensor gradient_state_, chunk_state_;
};

}  // namespace liger::LIGER_BACKEND
