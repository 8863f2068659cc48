#include "ops/fused_linear.h"

namespace liger::LIGER_BACKEND {

Schedule build_schedule(const Head& head, bool dx, bool dweight, bool dbias, int64_t gradients, int64_t chunk_rows, int64_t chunk_classes) {
  return {dx,
          dweight,
          dbias && head.has_bias(),
          Gradients(gradients),
          launch::equal_chunks(head.rows, chunk_rows),
          std::min(chunk_classes, head.vocab)};
}

ChunkBuffer::ChunkBuffer(const Head& head, const Schedule& schedule, bool gradient, const OptionalTensor& saved)
    : head_(head), saved_(saved.has_value()) {
  const auto chunk = [&](Dtype dtype) { return allocate(head.scope, {schedule.rows, schedule.stride()}, dtype, head.x()); };
  const bool wide = head.wide_logits();
  logits_ = saved && !wide ? *saved : chunk(head.logits_dtype);
  if (wide && gradient) rounded_ = saved ? *saved : chunk(head.compute);
}

Rows ChunkBuffer::gradient(Range rows, Range classes) const {
  const Rows found = readable(logits());
  if (!head_.wide_logits()) return found;
  const MutableRows out = from_row(mutable_rows(rounded_), saved_ ? rows.first : 0);
  scale_cast({rows.count, classes.count, found, out, nullptr, {}}, head_.scope);
  return readable(out);
}

RowSum weight_sum(const Head& head, const Tensor& memory, const Tensor& rest) {
  return {head.scope, head.vocab, head.hidden, head.sum, head.sum_sizes().rows, memory.data_ptr(), rest.data_ptr(), memory};
}

MutableRows Overlaid::where(const launch::OverlaidChunk& chunk, const Tensor& dweight, const Tensor& rest, const Tensor& spare) const {
  using Place = launch::OverlaidChunk::Place;
  const Tensor& memory = chunk.place == Place::dweight ? dweight : chunk.place == Place::rest ? rest : spare;
  return {at(memory.data_ptr(), chunk.offset, head_.compute), launch::padded_vocab(chunk.classes), head_.compute};
}

void Overlaid::input_gradient(const Tensor& dx) const {
  const int64_t in_dx =
      launch::overlaid_sum_rows(head_.rows, head_.hidden, int64_t(dtype_bytes(head_.compute)), int64_t(dtype_bytes(head_.acc)), 0);
  InputGradientSum sum(head_, dx, in_dx, allocate(head_.scope, {head_.rows - in_dx, head_.hidden}, head_.acc, dx), nullptr);
  for_each_stored([&](Range classes, const MutableRows& gradient) { sum.add(classes, readable(gradient)); });
  sum.finish({});
}

namespace {

Tensor sum(const Head& head, bool requested, const std::vector<int64_t>& sizes, Dtype dtype) {
  return allocate(head.scope, requested ? sizes : std::vector<int64_t>{0}, dtype, head.x());
}

}  // namespace

GradientSums::GradientSums(const Head& head, const Schedule& schedule, const Tensor& dweight)
    : GradientSums(head, schedule, sum(head, schedule.dx, {head.rows, head.hidden}, schedule.dx_is_term ? head.acc : head.compute), dweight,
                   sum(head, schedule.dweight, {head.sum_sizes().rest}, head.sum), sum(head, schedule.dbias, {head.vocab}, head.acc)) {}

GradientSums::GradientSums(const Head& head, const Schedule& schedule, const Tensor& dx, const Tensor& dweight, const Tensor& rest,
                           const Tensor& dbias)
    : dx(dx), dweight(dweight), rest(rest), dbias(dbias), head_(head), schedule_(schedule) {
  if (schedule.dx && schedule.cuts_vocabulary(head)) chunk_dx_ = sum(head, true, {schedule.rows, head.hidden}, head.acc);
}

void GradientSums::add(Range rows, Range classes, const Rows& gradient, const Rows& x, const Rows& row_scale) const {
  if (schedule_.dx) {
    const MutableRows out = mutable_rows(dx);
    if (!schedule_.cuts_vocabulary(head_)) {
      head_.input_gradient(rows, classes, gradient, out, nullptr, false);
    } else {
      const MutableRows sum = mutable_rows(chunk_dx_);
      head_.input_gradient({0, rows.count}, classes, gradient, sum, nullptr, classes.first > 0);
      if (classes.first + classes.count == head_.vocab)
        scale_cast({rows.count, head_.hidden, readable(sum), from_row(out, rows.first), nullptr, {}}, head_.scope);
    }
  }
  if (schedule_.dweight)
    weight_sum(head_, dweight, rest).for_each_part(classes, [&](int64_t first, int64_t count, const MutableRows& sum) {
      const Rows part{at(gradient.data, first - classes.first, gradient.dtype), gradient.stride, gradient.dtype};
      head_.weight_gradient({0, count}, rows.count, part, x, sum, nullptr, rows.first > 0);
    });
  if (schedule_.dbias) head_.bias_gradient(classes, rows.count, gradient, row_scale, dbias, rows.first > 0);
}

Backward::Backward(const Head& head, const Schedule& schedule, const Tensor& x, const OptionalTensor& bias, const Tensor& dloss,
                   bool per_row, const void* scale, double factor, bool in_place)
    : head_(head), schedule_(schedule), dloss_(contiguous(head.scope, dloss)), per_row_(per_row), in_place_(in_place) {
  const auto output = [&](bool wanted, const std::vector<int64_t>& sizes, ScalarType type) {
    return allocate(head.scope, wanted ? sizes : std::vector<int64_t>{0}, type, x);
  };
  dx = output(schedule.dx, {head.rows, head.hidden}, schedule.dx_is_term ? scalar_type(head.acc) : tensor_type(x));
  dbias = output(schedule.dbias, {head.vocab}, bias ? tensor_type(*bias) : scalar_type(head.acc));

  if (per_row_) row_grad_ = {dloss_.data_ptr(), 1, tensor_dtype(dloss_)};
  // alpha = [grad_output *] scale * factor: one number in device memory, the scale of every result. Per row, two more.
  scales_ = allocate(head.scope, {per_row_ ? 3 : 1}, head.acc, x);
  const Vector grad = per_row_ ? Vector{} : Vector{dloss_.data_ptr(), tensor_dtype(dloss_)};
  scalar_product({grad, scale, factor, head.acc, scales_.data_ptr(), row_grad_, head.rows}, head.scope);
}

Tensor Backward::new_dweight() const {
  return allocate(head_.scope, schedule_.dweight ? std::vector{head_.vocab, head_.hidden} : std::vector<int64_t>{0}, head_.weight, scales_);
}

void Backward::from_saved_gradient(const Tensor& saved, const Tensor& dx_sum) {
  dweight = new_dweight();
  const RowsView rows = as_matrix(head_.scope, saved);
  const Rows gradient = rows;
  if (dx_sum.numel() > 0) {
    scale(dx_sum, dx, alpha(), row_grad_);
  } else if (schedule_.dx) {
    // Rows that are scaled afterwards stay in the matmuls' dtype until then: in a narrower dtype of dx they would be rounded twice.
    const bool apart = per_row_ && !schedule_.dx_is_term && tensor_dtype(dx) != head_.compute;
    const Tensor unscaled = apart ? allocate(head_.scope, {head_.rows, head_.hidden}, head_.compute, scales_) : dx;
    into(unscaled,
         [&](const MutableRows& out) { head_.input_gradient(head_.all_rows(), head_.all_classes(), gradient, out, alpha(), false); });
    if (per_row_) scale(unscaled, dx, nullptr, row_grad_);
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

void Backward::from_overlaid(const Tensor& memory, const Tensor& rest, const Tensor& dx_sum,
                             const std::function<void(Range, const MutableRows&)>& make_again) {
  dweight = in_place_ ? memory : new_dweight();
  const Overlaid overlaid(head_, schedule_, memory, rest);
  const Range all = head_.all_rows();
  const auto elements = [&](int64_t bytes) { return bytes / int64_t(dtype_bytes(head_.compute)); };

  // The sum of dx lies in the spare; if the spare is too small, its first rows lie in the memory that becomes dx. If some gradients are
  // recomputed, they need the spare before dx is complete: then the rows that dx's memory does not hold lie in `apart`.
  const int64_t spare_bytes = overlaid.layout.spare * int64_t(dtype_bytes(head_.compute));
  const int64_t in_dx = launch::overlaid_sum_rows(head_.rows, head_.hidden, int64_t(dtype_bytes(tensor_dtype(dx))),
                                                  int64_t(dtype_bytes(head_.acc)), overlaid.all_stored() ? spare_bytes : 0);
  const bool sums_dx = schedule_.dx && dx_sum.numel() == 0;
  const int64_t dx_rest = sums_dx ? (head_.rows - in_dx) * head_.hidden * int64_t(dtype_bytes(head_.acc)) : 0;
  const int64_t spare_elements = elements(spare_bytes);
  const Tensor apart = allocate(head_.scope, {overlaid.all_stored() ? 0 : elements(dx_rest)}, head_.compute, scales_);
  const Tensor spare =
      allocate(head_.scope, {overlaid.all_stored() ? std::max(spare_elements, elements(dx_rest)) : spare_elements}, head_.compute, scales_);
  InputGradientSum sum(head_, dx, in_dx, overlaid.all_stored() ? spare : apart, alpha());
  const auto add_to_dx = [&](Range classes, const Rows& gradient) {
    if (sums_dx) sum.add(classes, gradient);
  };
  const auto finish_dx = [&] {
    if (sums_dx) sum.finish(row_grad_);
    else if (schedule_.dx) scale(dx_sum, dx, alpha(), row_grad_);
  };
  overlaid.for_each_stored([&](Range classes, const MutableRows& gradient) { add_to_dx(classes, readable(gradient)); });
  if (overlaid.all_stored()) finish_dx();

  const Tensor scaled = scaled_x_buffer(head_.rows),
               bias_sum = allocate(head_.scope, {schedule_.dbias ? head_.vocab : 0}, head_.acc, scales_);
  const Rows x = scaled_x(all, scaled);
  const MutableRows out = dweight_rows(), aside{spare.data_ptr(), head_.hidden, head_.weight};
  const auto make_dweight = [&](Range classes, const Rows& gradient, const MutableRows& to) {
    if (schedule_.dbias) head_.bias_gradient(classes, head_.rows, gradient, row_grad_, bias_sum, false);
    head_.weight_gradient({0, classes.count}, head_.rows, gradient, x, to, dweight_alpha(), false);
  };
  bool sets_aside =
      in_place_ && overlaid.layout.chunks[0].place == launch::OverlaidChunk::Place::dweight && !overlaid.layout.chunks[0].again;
  const Range first = {overlaid.layout.chunks[0].first, sets_aside ? overlaid.layout.chunks[0].classes : 0};
  overlaid.for_each_stored([&](Range classes, const MutableRows& gradient) {
    make_dweight(classes, readable(gradient), sets_aside ? aside : from_row(out, classes.first));
    sets_aside = false;
  });
  if (first.count > 0) scale_cast({first.count, head_.hidden, readable(aside), from_row(out, first.first), nullptr, {}}, head_.scope);

  // An op that must not write dweight must not write the rest either.
  const Tensor scratch = allocate(head_.scope, {in_place_ || overlaid.all_stored() ? 0 : rest.numel()}, head_.compute, scales_);
  for (const launch::OverlaidChunk& chunk : overlaid.layout.chunks) {
    if (!chunk.again) continue;
    const Range classes{chunk.first, chunk.classes};
    const MutableRows gradient = overlaid.where(chunk, dweight, in_place_ ? rest : scratch, spare);
    make_again(classes, gradient);
    add_to_dx(classes, readable(gradient));
    make_dweight(classes, readable(gradient), from_row(out, classes.first));
  }
  if (!overlaid.all_stored()) finish_dx();
  if (schedule_.dbias) scale(bias_sum, dbias, alpha(), {});
}

void Backward::from_sums(const Tensor& dx_sum, const Tensor& dweight_sum, const Tensor& rest, const Tensor& dbias_sum) {
  dweight = in_place_ ? dweight_sum : new_dweight();
  if (schedule_.dx) scale(dx_sum, dx, alpha(), row_grad_);
  if (schedule_.dweight) weight_sum(head_, dweight_sum, rest).scale_into(dweight_rows(), dweight_alpha(), {});
  if (schedule_.dbias) scale(dbias_sum, dbias, alpha(), {});
}

void Backward::zeros() {
  if (!in_place_) dweight = new_dweight();
  zero({dweight, dbias});
}

Tensor Backward::scaled_x_buffer(int64_t rows) const {
  return allocate(head_.scope, {per_row_ && schedule_.dweight ? rows : 0, head_.hidden}, head_.compute, scales_);
}

// Rows of x. If each row has its own grad_output, they are multiplied by it, relative to the largest grad_output of all.
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

// Runs a matmul into `out`. If a matmul cannot write out's dtype, it writes the accumulator's, and scale() converts the result.
template <class F> void Backward::into(const Tensor& out, F matmul) const {
  const MutableRows rows = mutable_rows(out);
  if (head_.writes(rows.dtype)) return matmul(rows);
  const Tensor wide = allocate_like(head_.scope, out, head_.acc);
  matmul(mutable_rows(wide));
  scale(wide, out, nullptr, {});
}

}  // namespace liger::LIGER_BACKEND
