// A head and its loss without the logits: chunks of rows go through one buffer, whole or in pieces of the vocabulary. A chunk's logits
// are a matmul; the loss turns them into their gradient in place; the gradients of x, weight and bias are matmuls of that. Nothing waits
// for the host: denominators and loss scale stay in device memory and multiply the results of the matmuls, so what is stored in 16 bits is
// never scaled by 1/N.
//
// Whole rows: the loss reads the logits once. Where the buffer is too small for 128 of them, pieces: a first round of matmuls for each
// piece's statistics, and after their merge a second round for the gradient.
//
// The ways to the gradients (launch/chunks.h), which the caller chooses:
//   deferred     the gradient of all logits is saved and the backward runs the matmuls, with alpha = grad_output * scale. No fp32 copy of
//                dweight exists, and per-row losses cost nothing extra.
//   accumulated  the forward adds up unreduced dx, dweight, dbias; the backward scales them.
//   recomputed   the backward runs the chunks again.
// If each row's loss is a result, it has its own grad_output. It never multiplies a gradient of logits, which 16 bits might not hold then:
// it multiplies the rows of dx when they are made, and for dweight those of x, relative to the largest of them.
//
// Loss is a class such as CrossEntropyLoss (cross_entropy_loss.h).
#pragma once
#include <algorithm>

#include "kernels/elementwise.h"
#include "launch/chunks.h"
#include "ops/head.h"

namespace liger::LIGER_BACKEND {

using launch::Gradients;

// Which gradients are wanted, how they come about, and how many rows and classes of logits exist at a time.
struct Schedule {
  bool dx, dweight, dbias;
  Gradients gradients;
  int64_t rows, classes;

  bool in_pieces(const Head& head) const { return classes < head.vocab; }
  // The buffer's rows begin aligned.
  int64_t stride() const { return launch::padded_vocab(classes); }
};

// chunk_rows, chunk_classes: at most so many rows, in the fewest equal chunks, and classes.
Schedule schedule_of(const Head& head, bool dx, bool dweight, bool dbias, int64_t gradients, int64_t chunk_rows, int64_t chunk_classes);

// The losses of all rows into `results`, unless it is null, and, if wanted, use(rows, classes, gradient) with each chunk's, or piece's,
// gradient of the logits, which lies in the buffer.
template <class Loss, class Results, class Use>
void for_each_chunk(const Head& head, const Loss& loss, const Schedule& schedule, const MutableRows& buffer, const Tensor& counts,
                    const Results* results, bool gradient, Use use) {
  for (int64_t first = 0; first < head.rows; first += schedule.rows) {
    const Range rows{first, std::min(schedule.rows, head.rows - first)};
    if (!schedule.in_pieces(head)) {
      head.logits(rows, head.all_classes(), buffer);
      loss.whole(rows, buffer, counts, results, gradient);
      if (gradient) use(rows, head.all_classes(), readable(buffer));
      continue;
    }
    const auto for_each_piece = [&](auto f) {
      for (int64_t begin = 0; begin < head.vocab; begin += schedule.classes) {
        const Range classes{begin, std::min(schedule.classes, head.vocab - begin)};
        head.logits(rows, classes, buffer);
        f(classes);
      }
    };
    const typename Loss::Pieces pieces(loss, rows, (head.vocab + schedule.classes - 1) / schedule.classes, counts, results);
    for_each_piece([&](Range classes) { pieces.statistics(classes.first / schedule.classes, classes, buffer); });
    pieces.merge();
    if (!gradient) continue;
    for_each_piece([&](Range classes) {
      pieces.gradient(classes, buffer);
      use(rows, classes, readable(buffer));
    });
  }
}

// Gradients without scale, summed over chunks and pieces; those not wanted are empty.
class GradientSums {
 public:
  GradientSums(const Head& head, const Schedule& schedule, bool wanted);
  // A chunk's, or piece's, share. x: the chunk's; row_scale: of the rows of dbias, or none.
  void add(Range rows, Range classes, const Rows& gradient, const Rows& x, const Rows& row_scale) const;

  Tensor dx, dweight, dbias;

 private:
  const Head& head_;
  const Schedule& schedule_;
  Tensor chunk_dx_;  // of pieces: a chunk's rows, in the accumulator's dtype
};

// The results of a backward in their parameters' dtypes, and how each of the ways makes them.
class Backward {
 public:
  // scale: what all gradients are multiplied by beside dloss, times `factor`.
  Backward(const Head& head, const Schedule& schedule, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
           const Tensor& dloss, bool per_row, const void* scale, double factor);

  void from_saved_gradient(const Tensor& saved);
  void from_sums(const Tensor& dx_sum, const Tensor& dweight_sum, const Tensor& dbias_sum);
  template <class Loss> void by_recomputing(const Loss& loss, const Tensor& counts) {
    const Tensor buffer = allocate(head_.scope, {schedule_.rows, schedule_.stride()}, head_.compute, scales_);
    const GradientSums sums(head_, schedule_, true);
    const Tensor scaled = scaled_x_buffer(schedule_.rows);
    Rows x;
    for_each_chunk<Loss, typename Loss::Results>(head_, loss, schedule_, mutable_rows(buffer), counts, nullptr, true,
                                                 [&](Range rows, Range classes, const Rows& gradient) {
                                                   if (schedule_.dweight && classes.first == 0) x = scaled_x(rows, scaled);
                                                   sums.add(rows, classes, gradient, x, from_row(row_grad_, rows.first));
                                                 });
    from_sums(sums.dx, sums.dweight, sums.dbias);
  }
  // Of no rows.
  void zeros();

  Tensor dx, dweight, dbias;

 private:
  // Of every result; of dweight, where x is scaled for it; what x is scaled by.
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
  bool per_row_;
};

}  // namespace liger::LIGER_BACKEND
