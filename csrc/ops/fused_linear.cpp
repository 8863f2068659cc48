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

GradientSums::GradientSums(const Head& head, const Schedule& schedule, bool wanted) : head_(head), schedule_(schedule) {
  const auto sum = [&](bool of, std::vector<int64_t> sizes, Dtype dtype) {
    return allocate(head.scope, wanted && of ? sizes : std::vector<int64_t>{0}, dtype, head.x());
  };
  dx = sum(schedule.dx, {head.rows, head.hidden}, head.compute);
  dweight = sum(schedule.dweight, {head.vocab, head.hidden}, head.accum);
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
  if (schedule_.dweight) head_.weight_gradient(classes, rows.count, gradient, x, mutable_rows(dweight), nullptr, rows.first > 0);
  if (schedule_.dbias) head_.bias_gradient(classes, rows.count, gradient, row_scale, dbias, rows.first > 0);
}

Backward::Backward(const Head& head, const Schedule& schedule, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const Tensor& dloss, bool per_row, const void* scale, double factor)
    : head_(head), schedule_(schedule), dloss_(contiguous(head.scope, dloss)), per_row_(per_row) {
  const auto output = [&](bool wanted, const std::vector<int64_t>& sizes, ScalarType type) {
    return allocate(head.scope, wanted ? sizes : std::vector<int64_t>{0}, type, x);
  };
  dx = output(schedule.dx, {head.rows, head.hidden}, type_of(x));
  dweight = output(schedule.dweight, {head.vocab, head.hidden}, type_of(weight));
  dbias = output(schedule.dbias, {head.vocab}, bias ? type_of(*bias) : scalar_type(head.acc));

  if (per_row_) row_grad_ = {dloss_.data_ptr(), 1, dtype_of(dloss_)};
  // alpha = [grad_output *] scale * factor: one number in device memory, the scale of every result. Per row, two more.
  scales_ = allocate(head.scope, {per_row_ ? 3 : 1}, head.acc, x);
  const Vector grad = per_row_ ? Vector{} : Vector{dloss_.data_ptr(), dtype_of(dloss_)};
  scalar_product({grad, scale, factor, head.acc, scales_.data_ptr(), row_grad_, head.rows}, head.scope);
}

void Backward::from_saved_gradient(const Tensor& saved) {
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

void Backward::from_sums(const Tensor& dx_sum, const Tensor& dweight_sum, const Tensor& dbias_sum) {
  if (schedule_.dx) scale(dx_sum, dx, alpha(), row_grad_);
  if (schedule_.dweight) scale(dweight_sum, dweight, dweight_alpha(), {});
  if (schedule_.dbias) scale(dbias_sum, dbias, alpha(), {});
}

void Backward::zeros() { zero({dweight, dbias}); }

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
