// The fused loss: a head and its loss, computed in chunks of the logits. A buffer holds the logits of a chunk: of some or all rows, or of
// some rows and classes. A matmul computes the logits, the loss overwrites them by their gradient, and further matmuls compute from this
// gradient the gradients of x, weight and bias. The host never waits for the device: the loss's factor `scale` (1/N for the mean of N rows)
// and the upstream gradient (a loss scale) stay in device memory and multiply the results of the matmuls. So a gradient of logits that is
// stored in 16 bits is never scaled by 1/N.
//
// Mostly the loss reads the logits of whole rows once. A plan for less memory also cuts the vocabulary into chunks. Then a first round of
// matmuls yields the statistics of each vocabulary chunk. After their merge, a second round yields the gradient.
//
// The caller selects the strategy for the gradients (launch/chunks.h):
//   deferred     The forward saves the gradient of all logits, and the backward runs the matmuls, whose results it multiplies by
//                grad_output * scale. dweight needs no fp32 sum over chunks, and reduction "none" no second computation of the logits.
//                If the matmuls read a converted copy of the weight, the forward computes dx (sums_dx in checks/head.h).
//   overlaid     As deferred, but the gradient of the logits is saved in chunks of the vocabulary, in the memory that becomes dweight and
//                in a further tensor, the rest (launch/chunks.h). dx is a sum over these chunks. The forward saves the gradient of the
//                first chunk_classes classes (an argument of the op); the backward recomputes the gradient of the others.
//   accumulated  The forward sums dx, dweight and dbias without the factor `scale`, and the backward multiplies them by it. The fp32 sum of
//                a 16-bit dweight lies half in dweight's memory, half in a further tensor, the rest; the backward converts it in place
//                (row_sum.h).
//   recomputed   The forward saves no gradient. The backward computes the logits of each chunk and their gradient again.
//
// fused_linear_cross_entropy_backward_ writes the gradient into the dweight that the forward returned; the op without the underscore
// allocates a new dweight. With reduction "none", each row has its own grad_output. The backward never multiplies a gradient of logits by
// it, because the product might leave the range of 16 bits. It multiplies the rows of dx by grad_output after their matmul. For dweight it
// multiplies the rows of x by grad_output, relative to the largest grad_output.
//
// Logits may be wider than the operands of the matmuls: fp32 logits of 16-bit operands. Then, with every strategy, they exist for a chunk
// of rows at a time, and the gradient of each chunk is rounded into the memory that the strategy uses.
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

// The gradients that are requested, the strategy that computes them, and the rows and classes of a chunk.
struct Schedule {
  bool dx, dweight, dbias;
  Gradients gradients;
  int64_t rows, classes;
  bool dx_is_term = false;  // dx is a term of a sum over vocabulary shards, which is rounded once: it is in the accumulator's dtype

  bool cuts_vocabulary(const Head& head) const { return classes < head.vocab; }
  // The row stride of the buffer: rows begin aligned.
  int64_t stride() const { return launch::padded_vocab(classes); }
};

// chunk_rows, chunk_classes: the limits of a chunk. The rows are cut into as few equal chunks as possible.
Schedule build_schedule(const Head& head, bool dx, bool dweight, bool dbias, int64_t gradients, int64_t chunk_rows, int64_t chunk_classes);

// The memory of a chunk's logits and of their gradient in the matmuls' dtype: the same memory or, with wide logits, other memory.
class ChunkBuffer {
 public:
  // gradient: whether it is computed. saved: memory for the gradient of all rows' logits, if that is saved.
  ChunkBuffer(const Head& head, const Schedule& schedule, bool gradient, const OptionalTensor& saved = {});

  MutableRows logits() const { return mutable_rows(logits_); }
  // The gradient of the logits. The loss must have overwritten the logits by it.
  Rows gradient(Range rows, Range classes) const;

 private:
  const Head& head_;
  bool saved_;
  Tensor logits_, rounded_;
};

// Runs all chunks: stores the losses of all rows in `results` (unless null) and, if `gradient`, calls use(rows, classes, gradient) with the
// gradient of each chunk's logits, of all classes or of a vocabulary chunk.
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

// The sum of dweight over chunks (checks/head.h). memory: becomes dweight.
RowSum weight_sum(const Head& head, const Tensor& memory, const Tensor& rest);

// Gradients without scale, summed over chunks of rows and of the vocabulary. A gradient that is not requested is empty. dweight and rest
// are the memory of weight_sum().
class GradientSums {
 public:
  GradientSums(const Head& head, const Schedule& schedule, const Tensor& dweight);
  GradientSums(const Head& head, const Schedule& schedule, const Tensor& dx, const Tensor& dweight, const Tensor& rest,
               const Tensor& dbias);
  // Adds the contribution of a chunk of rows, or of rows and classes. x: the chunk's rows of x. row_scale: the factor of each row in dbias,
  // or none.
  void add(Range rows, Range classes, const Rows& gradient, const Rows& x, const Rows& row_scale) const;

  Tensor dx, dweight, rest, dbias;

 private:
  const Head& head_;
  const Schedule& schedule_;
  Tensor chunk_dx_;  // if the vocabulary is cut: the rows of one chunk, in the accumulator's dtype
};

// dx of all rows, as a sum over chunks of the vocabulary.
class InputGradientSum {
 public:
  // in_dx: the number of rows of the sum that lie in dx's memory; the others lie in `rest`.
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

// Calls f(rows, logits) for each chunk of `step` rows, with the wide logits of some classes.
template <class F> void for_each_wide_chunk(const Head& head, int64_t step, Range classes, F f) {
  const Tensor buffer = allocate(head.scope, {step, launch::padded_vocab(classes.count)}, head.logits_dtype, head.x());
  for_each_range(head.scope, head.rows, step, [&](Range rows) {
    head.logits(rows, classes, mutable_rows(buffer));
    f(rows, mutable_rows(buffer));
  });
}
// Rounds some columns of the gradient of some rows into the same rows of `out`.
inline void round_classes(const Head& head, Range rows, const MutableRows& gradient, Range columns, const MutableRows& out) {
  const Rows in{at(gradient.data, columns.first, gradient.dtype), gradient.stride, gradient.dtype};
  scale_cast({rows.count, columns.count, in, from_row(out, rows.first), nullptr, {}}, head.scope);
}

// The gradient of the logits with strategy overlaid: in the memory that becomes dweight, and in the rest.
class Overlaid {
 public:
  // schedule.classes: the number of classes whose gradient is stored.
  Overlaid(const Head& head, const Schedule& schedule, const Tensor& memory, const Tensor& rest)
      : layout(launch::best_overlaid_layout(head.rows, head.overlaid_room(), head.hidden, head.vocab, schedule.classes)),
        head_(head),
        rows_(schedule.rows),
        stored_(schedule.classes),
        memory_(memory),
        rest_(rest) {}

  bool all_stored() const { return stored_ == head_.vocab; }

  // Stores the losses of all rows in `results`, and computes the stored gradient of the logits. gradient_state: memory for the numbers from
  // which the backward recomputes the other gradients (Loss::VocabularyChunks).
  template <class Loss>
  void make(const Loss& loss, const Tensor& counts, const typename Loss::Results* results, const OptionalTensor& gradient_state) const {
    if (head_.wide_logits()) return make_rounded(loss, counts, results);
    const Range all = head_.all_rows();
    // The logits of the other classes lie in the memory that the stored classes use afterwards.
    const int64_t at_a_time = launch::overlaid_statistics_classes(head_.rows, head_.overlaid_room(), head_.vocab);
    const int64_t others = all_stored() ? 0 : (head_.vocab - stored_ + at_a_time - 1) / at_a_time;
    const auto is_stored = [](const launch::OverlaidChunk& chunk) { return !chunk.again; };
    const int64_t stored = std::count_if(layout.chunks.begin(), layout.chunks.end(), is_stored);
    const typename Loss::VocabularyChunks vocabulary(loss, all, others + stored, counts, results, gradient_state);
    int64_t nth = others;
    for_each_range(head_.scope, all_stored() ? 0 : head_.vocab - stored_, at_a_time, [&](Range other_classes) {
      const Range classes{stored_ + other_classes.first, other_classes.count};
      const MutableRows logits{memory_.data_ptr(), launch::padded_vocab(classes.count), head_.compute};
      head_.logits(all, classes, logits);
      vocabulary.statistics(other_classes.first / at_a_time, classes, logits);
    });
    std::vector<LogitsChunk> by_class;
    for_each_stored([&](Range classes, const MutableRows& logits) {
      head_.logits(all, classes, logits);
      by_class.push_back({classes.first, logits});
    });
    std::sort(by_class.begin(), by_class.end(), [](const LogitsChunk& a, const LogitsChunk& b) { return a.first < b.first; });
    const void* const other_statistics = others > 0 ? vocabulary.chunk_statistics(0) : nullptr;
    if (stored > 0 && others <= 1 &&
        loss.in_chunks(all, by_class, std::min(stored_, head_.vocab), other_statistics, counts, results, gradient_state))
      return;
    for_each_stored([&](Range classes, const MutableRows& logits) { vocabulary.statistics(nth++, classes, logits); });
    vocabulary.merge(nth);
    for_each_stored([&](Range classes, const MutableRows& logits) { vocabulary.gradient(classes, logits); });
  }

  // dx = the stored gradients @ weight.
  void input_gradient(const Tensor& dx) const;

  // Calls f(classes, gradient) for each stored chunk, in the order in which the matmuls of dweight read them.
  template <class F> void for_each_stored(F f) const {
    for (const launch::OverlaidChunk& chunk : layout.chunks)
      if (!chunk.again) f(Range{chunk.first, chunk.classes}, where(chunk, memory_, rest_, memory_));
  }
  // The memory of a chunk's gradient.
  MutableRows where(const launch::OverlaidChunk& chunk, const Tensor& dweight, const Tensor& rest, const Tensor& spare) const;

  const launch::OverlaidLayout layout;

 private:
  // make() for wide logits, a chunk of rows at a time.
  template <class Loss> void make_rounded(const Loss& loss, const Tensor& counts, const typename Loss::Results* results) const {
    for_each_wide_chunk(head_, rows_, head_.all_classes(), [&](Range rows, const MutableRows& logits) {
      if (all_stored()) {
        loss.whole(rows, logits, counts, results, true);
      } else {  // merge() saves the log-sum-exps, from which the backward recomputes the other classes' gradient
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

// Computes the results of a backward, in their parameters' dtypes, with a function for each strategy.
class Backward {
 public:
  // All gradients are multiplied by dloss, *scale and factor. in_place: the dweight that the forward returned becomes the gradient.
  Backward(const Head& head, const Schedule& schedule, const Tensor& x, const OptionalTensor& bias, const Tensor& dloss, bool per_row,
           const void* scale, double factor, bool in_place);

  // dx_sum: dx of GradientSums if the forward has summed it, else empty.
  void from_saved_gradient(const Tensor& saved, const Tensor& dx_sum);
  // make_again(classes, out) recomputes the gradient of all rows' logits of classes that are not stored.
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
  // The gradients of a call without rows.
  void zeros();

  Tensor dx, dweight, dbias;

 private:
  Tensor new_dweight() const;
  MutableRows dweight_rows() const { return {dweight.data_ptr(), head_.hidden, head_.weight}; }
  // Factors in device memory: of every result, of dweight (whose x may be scaled), and of that x.
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
