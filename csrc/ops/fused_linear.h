// A head and its loss without the logits: chunks of rows go through one buffer, whole or cut into chunks of the vocabulary. A chunk's
// logits are a matmul; the loss turns them into their gradient in place; the gradients of x, weight and bias are matmuls of that. Nothing
// waits for the host: denominators and loss scale stay in device memory and multiply the results of the matmuls, so what is stored in 16
// bits is never scaled by 1/N.
//
// Of whole rows the loss reads the logits once. Where the buffer is too small for 128 of them, the vocabulary is cut: a first round of
// matmuls gives each vocabulary chunk's statistics, and after their merge a second round the gradient.
//
// The ways to the gradients (launch/chunks.h), which the caller chooses:
//   deferred     the gradient of all logits is saved and the backward runs the matmuls, with alpha = grad_output * scale. No fp32 copy of
//                dweight exists, and per-row losses cost nothing extra.
//   overlaid     the same, where the gradient of the logits waits in the memory that becomes dweight, and in a rest, in chunks of the
//                vocabulary (launch/chunks.h); dx is a sum over them. Of classes beyond chunk_classes it is made again in the backward.
//   accumulated  the forward adds up unreduced dx, dweight, dbias; the backward scales them. The fp32 sum of a 16-bit dweight lies half in
//                dweight's memory, half in a rest: the backward makes of the one what belongs there, and then what the other holds.
//   recomputed   the backward runs the chunks again.
// dweight's memory is written by the backward that may (fused_linear_cross_entropy_backward_); the other makes a new dweight beside it.
// If each row's loss is a result, it has its own grad_output. It never multiplies a gradient of logits, which 16 bits might not hold then:
// it multiplies the rows of dx when they are made, and for dweight those of x, relative to the largest of them.
//
// Logits may be wider than the operands of the matmuls: fp32 of 16-bit ones. Then they exist a chunk of rows at a time in every way, and
// the gradient of each chunk is rounded to where the ways above have it.
//
// Loss is a class such as CrossEntropyLoss (cross_entropy_loss.h).
#pragma once
#include <algorithm>
#include <functional>

#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "launch/chunks.h"
#include "ops/head.h"
#include "ops/row_sum.h"

namespace liger::LIGER_BACKEND {

using launch::Gradients;

// Which gradients are wanted, how they come about, and how many rows and classes of logits exist at a time.
struct Schedule {
  bool dx, dweight, dbias;
  Gradients gradients;
  int64_t rows, classes;
  bool dx_is_term = false;  // of a sum over shards of the vocabulary: in the accumulator's dtype, for the sum to be rounded once

  bool cuts_vocabulary(const Head& head) const { return classes < head.vocab; }
  // The buffer's rows begin aligned.
  int64_t stride() const { return launch::padded_vocab(classes); }
};

// chunk_rows, chunk_classes: the most rows of a chunk, of which there are as few equal ones as possible, and the most classes.
Schedule schedule_of(const Head& head, bool dx, bool dweight, bool dbias, int64_t gradients, int64_t chunk_rows, int64_t chunk_classes);

// A chunk's logits, and their gradient as the matmuls take it: in the same memory or, of wide logits, rounded to other memory.
class ChunkBuffer {
 public:
  // gradient: is it wanted? saved: memory for the gradient of all rows' logits, if that is saved.
  ChunkBuffer(const Head& head, const Schedule& schedule, bool gradient, const OptionalTensor& saved = {});

  MutableRows logits() const { return mutable_rows(logits_); }
  // Of the logits that the loss has turned into their gradient.
  Rows gradient(Range rows, Range classes) const;

 private:
  const Head& head_;
  bool saved_;
  Tensor logits_, rounded_;
};

// The losses of all rows into `results`, unless it is null, and, if wanted, use(rows, classes, gradient) with the
// gradient of each chunk's logits, of all classes or of a vocabulary chunk, which lies in the buffer.
template <class Loss, class Results, class Use>
void for_each_chunk(const Head& head, const Loss& loss, const Schedule& schedule, const ChunkBuffer& buffer, const Tensor& counts,
                    const Results* results, bool gradient, Use use) {
  const MutableRows logits = buffer.logits();
  for_each_range(head.scope, head.rows, schedule.rows, [&](Range rows) {
    if (!schedule.cuts_vocabulary(head)) {
      head.logits(rows, head.all_classes(), logits);
      loss.whole(rows, logits, counts, results, gradient);
      if (gradient) use(rows, head.all_classes(), buffer.gradient(rows, head.all_classes()));
      return;
    }
    const auto for_each_vocabulary_chunk = [&](auto f) {
      for_each_range(head.scope, head.vocab, schedule.classes, [&](Range classes) {
        head.logits(rows, classes, logits);
        f(classes);
      });
    };
    const int64_t count = (head.vocab + schedule.classes - 1) / schedule.classes;
    const typename Loss::VocabularyChunks chunks(loss, rows, count, counts, results);
    for_each_vocabulary_chunk([&](Range classes) { chunks.statistics(classes.first / schedule.classes, classes, logits); });
    chunks.merge(count);
    if (!gradient) return;
    for_each_vocabulary_chunk([&](Range classes) {
      chunks.gradient(classes, logits);
      use(rows, classes, buffer.gradient(rows, classes));
    });
  });
}

// The sum of dweight over chunks (checks/head.h). memory: that which becomes dweight.
RowSum weight_sum(const Head& head, const Tensor& memory, const Tensor& rest);

// Gradients without scale, summed over chunks of rows and of the vocabulary; those not wanted are empty. dweight and rest: of weight_sum.
class GradientSums {
 public:
  GradientSums(const Head& head, const Schedule& schedule, const Tensor& dweight);
  // The share of a chunk of rows, or of one of its vocabulary chunks. x: the chunk's; row_scale: of the rows of dbias, or none.
  void add(Range rows, Range classes, const Rows& gradient, const Rows& x, const Rows& row_scale) const;

  Tensor dx, dweight, rest, dbias;

 private:
  const Head& head_;
  const Schedule& schedule_;
  Tensor chunk_dx_;  // if the vocabulary is cut: the rows of one chunk, in the accumulator's dtype
};

// dx as a sum over chunks of the vocabulary, of all rows.
class InputGradientSum {
 public:
  // in_dx: how many rows of the sum lie in dx's memory; the others lie in `rest`.
  InputGradientSum(const Head& head, const Tensor& dx, int64_t in_dx, const Tensor& rest, const void* alpha)
      : head_(head),
        dx_(dx),
        rest_(rest),
        sum_(head.scope, head.rows, head.hidden, head.acc, in_dx, dx.data_ptr(), rest.data_ptr(), head.x()),
        alpha_(alpha) {}

  void add(Range classes, const Rows& gradient) {
    sum_.for_each_part(head_.all_rows(), [&](int64_t first, int64_t count, const MutableRows& sum) {
      head_.input_gradient({0, count}, classes, from_row(gradient, first), sum, alpha_, begun_);
    });
    begun_ = true;
  }
  // Rounds the sum to dx, each row times its row_scale.
  void finish(const Rows& row_scale) const { sum_.scale_into(mutable_rows(dx_), nullptr, row_scale); }

 private:
  const Head& head_;
  const Tensor dx_, rest_;
  const RowSum sum_;
  const void* alpha_;
  bool begun_ = false;
};

// f(rows, logits) of each chunk of `step` rows, with wide logits of some classes.
template <class F> void for_each_wide_chunk(const Head& head, int64_t step, Range classes, F f) {
  const Tensor buffer = allocate(head.scope, {step, launch::padded_vocab(classes.count)}, head.logits_dtype, head.x());
  for_each_range(head.scope, head.rows, step, [&](Range rows) {
    head.logits(rows, classes, mutable_rows(buffer));
    f(rows, mutable_rows(buffer));
  });
}
// Rounds the gradient of some rows, and of some of its columns, to these rows of `out`.
inline void round_classes(const Head& head, Range rows, const MutableRows& gradient, Range columns, const MutableRows& out) {
  const Rows in{at(gradient.data, columns.first, gradient.dtype), gradient.stride, gradient.dtype};
  scale_cast({rows.count, columns.count, in, from_row(out, rows.first), nullptr, {}}, head.scope);
}

// The gradient of the logits in the memory that becomes dweight, and in a rest.
class Overlaid {
 public:
  // schedule.classes: how many are stored.
  Overlaid(const Head& head, const Schedule& schedule, const Tensor& memory, const Tensor& rest)
      : layout(launch::best_overlaid_layout(head.rows, head.overlaid_room(), head.hidden, head.vocab, schedule.classes)),
        head_(head),
        rows_(schedule.rows),
        stored_(schedule.classes),
        memory_(memory),
        rest_(rest) {}

  bool all_stored() const { return stored_ == head_.vocab; }

  // The losses of all rows into `results`, and the gradient of the logits. kept: what the backward makes the others of
  // (Loss::VocabularyChunks).
  template <class Loss>
  void make(const Loss& loss, const Tensor& counts, const typename Loss::Results* results, const OptionalTensor& kept) const {
    if (head_.wide_logits()) return make_rounded(loss, counts, results);
    const Range all = head_.all_rows();
    // The others' logits lie where the stored ones will.
    const int64_t at_a_time = launch::overlaid_at_a_time(head_.rows, head_.overlaid_room(), head_.vocab);
    const int64_t others = all_stored() ? 0 : (head_.vocab - stored_ + at_a_time - 1) / at_a_time;
    const auto is_stored = [](const launch::OverlaidChunk& chunk) { return !chunk.again; };
    const int64_t stored = std::count_if(layout.chunks.begin(), layout.chunks.end(), is_stored);
    const typename Loss::VocabularyChunks of(loss, all, others + stored, counts, results, kept);
    int64_t nth = others;
    for_each_range(head_.scope, all_stored() ? 0 : head_.vocab - stored_, at_a_time, [&](Range of_others) {
      const Range classes{stored_ + of_others.first, of_others.count};
      const MutableRows logits{memory_.data_ptr(), launch::padded_vocab(classes.count), head_.compute};
      head_.logits(all, classes, logits);
      of.statistics(of_others.first / at_a_time, classes, logits);
    });
    std::vector<LogitsChunk> by_class;
    for_each_stored([&](Range classes, const MutableRows& logits) {
      head_.logits(all, classes, logits);
      by_class.push_back({classes.first, logits});
    });
    std::sort(by_class.begin(), by_class.end(), [](const LogitsChunk& a, const LogitsChunk& b) { return a.first < b.first; });
    const void* const of_others = others > 0 ? of.statistics_of(0) : nullptr;
    if (stored > 0 && others <= 1 && loss.in_chunks(all, by_class, std::min(stored_, head_.vocab), of_others, counts, results, kept))
      return;
    for_each_stored([&](Range classes, const MutableRows& logits) { of.statistics(nth++, classes, logits); });
    of.merge(nth);
    for_each_stored([&](Range classes, const MutableRows& logits) { of.gradient(classes, logits); });
  }

  // dx = the stored gradients @ weight.
  void input_gradient(const Tensor& dx) const;

  // f(classes, their gradient) of each stored chunk, in the order in which dweight is made.
  template <class F> void for_each_stored(F f) const {
    for (const launch::OverlaidChunk& chunk : layout.chunks)
      if (!chunk.again) f(Range{chunk.first, chunk.classes}, where(chunk, memory_, rest_, memory_));
  }
  // A chunk's gradient.
  MutableRows where(const launch::OverlaidChunk& chunk, const Tensor& dweight, const Tensor& rest, const Tensor& spare) const;

  const launch::OverlaidLayout layout;

 private:
  // Of wide logits: chunks of rows.
  template <class Loss> void make_rounded(const Loss& loss, const Tensor& counts, const typename Loss::Results* results) const {
    for_each_wide_chunk(head_, rows_, head_.all_classes(), [&](Range rows, const MutableRows& logits) {
      if (all_stored()) {
        loss.whole(rows, logits, counts, results, true);
      } else {  // merge() keeps the log-sum-exps from which the backward makes the other classes' gradient
        const typename Loss::VocabularyChunks row(loss, rows, 1, counts, results);
        row.statistics(0, head_.all_classes(), logits);
        row.merge(1);
        row.gradient(head_.all_classes(), logits);
      }
      for_each_stored([&](Range classes, const MutableRows& out) { round_classes(head_, rows, logits, classes, out); });
    });
  }

  const Head& head_;
  int64_t rows_, stored_;
  Tensor memory_, rest_;
};

// The results of a backward in their parameters' dtypes, and how each of the ways makes them.
class Backward {
 public:
  // scale: what all gradients are multiplied by beside dloss, times `factor`. in_place: the dweight that the forward returned is to become
  // the gradient.
  Backward(const Head& head, const Schedule& schedule, const Tensor& x, const OptionalTensor& bias, const Tensor& dloss, bool per_row,
           const void* scale, double factor, bool in_place);

  // dx_sum: of GradientSums, if the forward has summed dx.
  void from_saved_gradient(const Tensor& saved, const Tensor& dx_sum);
  // make_again(classes, out): the gradient of all rows' logits of classes that are not stored.
  void from_overlaid(const Tensor& memory, const Tensor& rest, const Tensor& dx_sum,
                     const std::function<void(Range, const MutableRows&)>& make_again);
  void from_sums(const Tensor& dx_sum, const Tensor& dweight_sum, const Tensor& rest, const Tensor& dbias_sum);
  template <class Loss> void by_recomputing(const Loss& loss, const Tensor& counts) {
    const ChunkBuffer buffer(head_, schedule_, true);
    in_place_ = true;
    const GradientSums sums(head_, schedule_, new_dweight());
    const Tensor scaled = scaled_x_buffer(schedule_.rows);
    Rows x;
    for_each_chunk<Loss, typename Loss::Results>(head_, loss, schedule_, buffer, counts, nullptr, true,
                                                 [&](Range rows, Range classes, const Rows& gradient) {
                                                   if (schedule_.dweight && classes.first == 0) x = scaled_x(rows, scaled);
                                                   sums.add(rows, classes, gradient, x, from_row(row_grad_, rows.first));
                                                 });
    from_sums(sums.dx, sums.dweight, sums.rest, sums.dbias);
  }
  // The gradients of a call that has no rows.
  void zeros();

  Tensor dx, dweight, dbias;

 private:
  Tensor new_dweight() const;
  MutableRows dweight_rows() const { return {dweight.data_ptr(), head_.hidden, head_.weight}; }
  // The factors of every result, of dweight (where x is scaled for it), and of that x.
  const void* alpha() const { return scales_.data_ptr(); }
  const void* dweight_alpha() const { return per_row_ ? scale_at(1) : alpha(); }
  const void* x_scale() const { return scale_at(2); }
  const void* scale_at(int64_t i) const { return at(scales_.data_ptr(), i, head_.acc); }

  Tensor scaled_x_buffer(int64_t rows) const;
  Rows scaled_x(Range rows, const Tensor& buffer) const;
  void scale(const Tensor& in, const Tensor& out, const void* factor, const Rows& row_grad) const;
  template <class F> void into(const Tensor& out, F matmul) const;

  const Head& head_;
  const Schedule& schedule_;
  Tensor dloss_, scales_;
  Rows row_grad_;
  bool per_row_, in_place_;
};

}  // namespace liger::LIGER_BACKEND
