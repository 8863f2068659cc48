#include "ops/fused_linear.h"

namespace liger::LIGER_BACKEND {

Schedule schedule_of(const Head& head, bool dx, bool dweight, bool dbias, int64_t gradients, int64_t chunk_rows, int64_t chunk_classes) {
  return {dx,
          dweight,
          dbias && head.has_bias(),
          Gradients(gradients),
          launch::equal_chunks(head.rows, chunk_rows),
          std::min(chunk_classes, head.vocab)};
}

WeightSum::WeightSum(const Head& head, const Tensor& memory, const Tensor& rest)
    : head_(head), memory_(memory), rest_(rest), in_memory_(head.sum_sizes().rows) {}

// The sum's row, and those behind it in the same memory.
MutableRows WeightSum::sum_of(int64_t row) const {
  const bool inside = row < in_memory_;
  void* const first = inside ? memory_.data_ptr() : rest_.data_ptr();
  return from_row(MutableRows{first, head_.hidden, head_.sum}, inside ? row : row - in_memory_);
}

void WeightSum::add(Range rows, Range classes, const Rows& gradient, const Rows& x) const {
  const int64_t end = classes.first + classes.count, inside = std::clamp(in_memory_ - classes.first, int64_t{0}, classes.count);
  const auto add_part = [&](int64_t first, int64_t count) {
    if (count == 0) return;
    const Rows part{at(gradient.data, first - classes.first, gradient.dtype), gradient.stride, gradient.dtype};
    head_.weight_gradient({0, count}, rows.count, part, x, sum_of(first), nullptr, rows.first > 0);
  };
  add_part(classes.first, inside);
  add_part(classes.first + inside, end - classes.first - inside);
}

void WeightSum::scale_rows(int64_t first, int64_t rows, const MutableRows& out, const void* factor) const {
  if (rows > 0) scale_cast({rows, head_.hidden, readable(sum_of(first)), from_row(out, first), factor, {}}, head_.scope);
}

void WeightSum::scale_into(const MutableRows& out, const void* factor) const {
  if (head_.hidden == 0) return;
  if (out.data == memory_.data_ptr() && out.dtype != head_.sum) narrow_in_place(out, factor);
  else scale_rows(0, in_memory_, out, factor);
  scale_rows(in_memory_, head_.vocab - in_memory_, out, factor);
}

// Rows of wider numbers become rows of narrower ones in the same memory. What the first `done` rows took has room for `ratio` times as
// many, so that many can be made at a time from then on; the first are made elsewhere.
void WeightSum::narrow_in_place(const MutableRows& out, const void* factor) const {
  const auto ratio = int64_t(size_of(head_.sum) / size_of(out.dtype));
  int64_t done = std::min(launch::narrowed_elsewhere, in_memory_);
  const Tensor elsewhere = allocate(head_.scope, {done, head_.hidden}, out.dtype, memory_);
  const MutableRows first = mutable_rows(elsewhere);
  scale_rows(0, done, first, factor);
  if (done > 0) scale_cast({done, head_.hidden, readable(first), out, nullptr, {}}, head_.scope);
  for (int64_t next; done < in_memory_; done = next) {
    next = std::min(done * ratio, in_memory_);
    scale_rows(done, next - done, out, factor);
  }
}

MutableRows Overlaid::gradient(size_t piece) const {
  const launch::OverlaidPiece& p = pieces[piece];
  const Tensor& memory = p.in_dweight ? memory_ : rest_;
  return {at(memory.data_ptr(), p.offset, head_.compute), launch::padded_vocab(p.classes), head_.compute};
}

GradientSums::GradientSums(const Head& head, const Schedule& schedule, bool wanted, const Tensor& dweight)
    : dweight(dweight), head_(head), schedule_(schedule) {
  const auto sum = [&](bool of, std::vector<int64_t> sizes, Dtype dtype) {
    return allocate(head.scope, wanted && of ? sizes : std::vector<int64_t>{0}, dtype, head.x());
  };
  dx = sum(schedule.dx, {head.rows, head.hidden}, head.compute);
  rest = sum(schedule.dweight, {head.sum_sizes().rest}, head.sum);
  dbias = sum(schedule.dbias, {head.vocab}, head.acc);
  if (wanted && schedule.dx && schedule.in_pieces(head)) chunk_dx_ = sum(true, {schedule.rows, head.hidden}, head.acc);
}

void GradientSums::add(Range rows, Range classes, const Rows& gradient, const Rows& x, const Rows& row_scale) const {
  if (schedule_.dx) {
    const MutableRows out = mutable_rows(dx);
    if (!schedule_.in_pieces(head_)) {
      head_.input_gradient(rows, classes, gradient, out, nullptr, false);
    } else {
      const MutableRows sum = mutable_rows(chunk_dx_);
      head_.input_gradient({0, rows.count}, classes, gradient, sum, nullptr, classes.first > 0);
      if (classes.first + classes.count == head_.vocab)
        scale_cast({rows.count, head_.hidden, readable(sum), from_row(out, rows.first), nullptr, {}}, head_.scope);
    }
  }
  if (schedule_.dweight) WeightSum(head_, dweight, rest).add(rows, classes, gradient, x);
  if (schedule_.dbias) head_.bias_gradient(classes, rows.count, gradient, row_scale, dbias, rows.first > 0);
}

Backward::Backward(const Head& head, const Schedule& schedule, const Tensor& x, const OptionalTensor& bias, const Tensor& dloss,
                   bool per_row, const void* scale, double factor, bool in_place)
    : head_(head), schedule_(schedule), dloss_(contiguous(head.scope, dloss)), per_row_(per_row), in_place_(in_place) {
  const auto output = [&](bool wanted, const std::vector<int64_t>& sizes, ScalarType type) {
    return allocate(head.scope, wanted ? sizes : std::vector<int64_t>{0}, type, x);
  };
  dx = output(schedule.dx, {head.rows, head.hidden}, type_of(x));
  dbias = output(schedule.dbias, {head.vocab}, bias ? type_of(*bias) : scalar_type(head.acc));

  if (per_row_) row_grad_ = {dloss_.data_ptr(), 1, dtype_of(dloss_)};
  // alpha = [grad_output *] scale * factor: one number in device memory, the scale of every result. Per row, two more.
  scales_ = allocate(head.scope, {per_row_ ? 3 : 1}, head.acc, x);
  const Vector grad = per_row_ ? Vector{} : Vector{dloss_.data_ptr(), dtype_of(dloss_)};
  scalar_product({grad, scale, factor, head.acc, scales_.data_ptr(), row_grad_, head.rows}, head.scope);
}

Tensor Backward::new_dweight() const {
  return allocate(head_.scope, schedule_.dweight ? std::vector{head_.vocab, head_.hidden} : std::vector<int64_t>{0}, head_.weight, scales_);
}

void Backward::from_saved_gradient(const Tensor& saved) {
  dweight = new_dweight();
  const RowsView rows = as_matrix(head_.scope, saved);
  const Rows gradient = rows;
  if (schedule_.dx) {
    // Rows that are still to be scaled stay in the matmuls' dtype: a narrower one would round them twice.
    const bool apart = per_row_ && dtype_of(dx) != head_.compute;
    const Tensor made = apart ? allocate(head_.scope, {head_.rows, head_.hidden}, head_.compute, scales_) : dx;
    into(made, [&](const MutableRows& out) { head_.input_gradient(head_.all_rows(), head_.all_classes(), gradient, out, alpha(), false); });
    if (per_row_) scale(made, dx, nullptr, row_grad_);
  }
  if (schedule_.dweight) {
    const Tensor scaled = scaled_x_buffer(head_.rows);
    const Rows x = scaled_x(head_.all_rows(), scaled);
    into(dweight,
         [&](const MutableRows& out) { head_.weight_gradient(head_.all_classes(), head_.rows, gradient, x, out, dweight_alpha(), false); });
  }
  if (schedule_.dbias) {
    const Tensor sum = allocate(head_.scope, {head_.vocab}, head_.acc, scales_);
    head_.bias_gradient(head_.all_classes(), head_.rows, gradient, row_grad_, sum, false);
    scale(sum, dbias, alpha(), {});
  }
}

void Backward::from_overlaid(const Tensor& dweight_memory, const Tensor& rest) {
  dweight = in_place_ ? dweight_memory : new_dweight();
  const Overlaid overlaid(head_, dweight_memory, rest);
  const auto gradient = [&](size_t i) { return readable(overlaid.gradient(i)); };
  const size_t pieces = overlaid.pieces.size();
  // For what is set aside of dweight, and before, for blocks of rows of dx in the accumulator's dtype.
  const int64_t wide = int64_t(size_of(head_.acc) / size_of(head_.compute)), aside = overlaid.classes(0).count;
  const int64_t block = launch::overlaid_block(head_.rows, aside, wide);
  const Tensor spare = allocate(head_.scope, {std::max(aside, block * wide) * head_.hidden}, head_.compute, scales_);

  for (int64_t first = 0; schedule_.dx && first < head_.rows; first += block) {
    const Range rows{0, std::min(block, head_.rows - first)};
    const MutableRows sum{spare.data_ptr(), head_.hidden, head_.acc};
    for (size_t i = 0; i < pieces; ++i) head_.input_gradient(rows, overlaid.classes(i), from_row(gradient(i), first), sum, alpha(), i > 0);
    scale_cast({rows.count, head_.hidden, readable(sum), from_row(mutable_rows(dx), first), nullptr, from_row(row_grad_, first)},
               head_.scope);
  }

  const Tensor scaled = scaled_x_buffer(head_.rows);
  const Rows x = scaled_x(head_.all_rows(), scaled);
  const MutableRows out = dweight_rows(), apart{spare.data_ptr(), head_.hidden, head_.compute};
  const bool sets_aside = in_place_ && overlaid.pieces[0].in_dweight;
  const Tensor sum = allocate(head_.scope, {schedule_.dbias ? head_.vocab : 0}, head_.acc, scales_);
  for (size_t i = 0; i < pieces; ++i) {
    const Range classes = overlaid.classes(i);
    if (schedule_.dbias) head_.bias_gradient(classes, head_.rows, gradient(i), row_grad_, sum, false);
    const MutableRows to = sets_aside && i == 0 ? apart : from_row(out, classes.first);
    head_.weight_gradient({0, classes.count}, head_.rows, gradient(i), x, to, dweight_alpha(), false);
  }
  if (sets_aside) scale_cast({aside, head_.hidden, readable(apart), from_row(out, overlaid.classes(0).first), nullptr, {}}, head_.scope);
  if (schedule_.dbias) scale(sum, dbias, alpha(), {});
}

void Backward::from_sums(const Tensor& dx_sum, const Tensor& dweight_sum, const Tensor& rest, const Tensor& dbias_sum) {
  dweight = in_place_ ? dweight_sum : new_dweight();
  if (schedule_.dx) scale(dx_sum, dx, alpha(), row_grad_);
  if (schedule_.dweight) WeightSum(head_, dweight_sum, rest).scale_into(dweight_rows(), dweight_alpha());
  if (schedule_.dbias) scale(dbias_sum, dbias, alpha(), {});
}

void Backward::zeros() {
  if (!in_place_) dweight = new_dweight();
  zero({dweight, dbias});
}

Tensor Backward::scaled_x_buffer(int64_t rows) const {
  return allocate(head_.scope, {per_row_ && schedule_.dweight ? rows : 0, head_.hidden}, head_.compute, scales_);
}

// Rows of x, times their grad_output if each has its own, relative to the largest grad_output of all.
Rows Backward::scaled_x(Range rows, const Tensor& buffer) const {
  if (!per_row_) return from_row(head_.x_rows(), rows.first);
  const MutableRows out = mutable_rows(buffer);
  scale_cast({rows.count, head_.hidden, from_row(head_.x_rows(), rows.first), out, x_scale(), from_row(row_grad_, rows.first)},
             head_.scope);
  return readable(out);
}

// out = in * factor [* each row's grad_output]
void Backward::scale(const Tensor& in, const Tensor& out, const void* factor, const Rows& row_grad) const {
  if (out.numel() == 0) return;
  const int64_t cols = out.size(out.dim() - 1), rows = out.numel() / cols;
  scale_cast({rows, cols, readable(mutable_rows(in)), mutable_rows(out), factor, row_grad}, head_.scope);
}

// Runs a matmul into `out`, by way of the accumulator dtype where a matmul cannot write out's.
template <class F> void Backward::into(const Tensor& out, F matmul) const {
  const MutableRows rows = mutable_rows(out);
  if (head_.writes(rows.dtype)) return matmul(rows);
  const Tensor wide = allocate_like(head_.scope, out, head_.acc);
  matmul(mutable_rows(wide));
  scale(wide, out, nullptr, {});
}

}  // namespace liger::LIGER_BACKEND
