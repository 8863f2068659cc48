// The ops rms_norm and add_rms_norm and their backwards.
#include "checks/norms.h"
#include "ops/norms.h"

namespace liger::LIGER_BACKEND {
namespace {

// The forward of both ops: y and rstd of x, or of x + residual, which is stored in `sum`.
std::tuple<Tensor, Tensor> forward(const Scope& scope, const Tensor& x, const RowsView& rows, const Rows& residual, const MutableRows& sum,
                                   Dtype dtype, const OptionalTensor& weight_argument, double eps, double offset, int64_t casting_mode) {
  const OptionalTensor weight = contiguous(scope, weight_argument);
  Tensor y = allocate_like(scope, x, dtype), rstd = allocate_statistics(scope, x, dtype);
  if (x.numel() > 0)
    norm_forward(RmsNormForward{.rows = rows.rows,
                                .cols = rows.cols,
                                .x = rows,
                                .residual = residual,
                                .sum = sum,
                                .weight = as_vector(weight),
                                .y = mutable_rows(y),
                                .rstd = rstd.data_ptr(),
                                .eps = eps,
                                .offset = offset,
                                .round_normalized = casting_mode == 0},
                 scope);
  else zero({rstd});  // of rows without columns
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_op(Tensor x, OptionalTensor weight, double eps, double offset, int64_t casting_mode) {
  const Scope scope("rms_norm", x);
  const RowsView rows = as_rows(scope, x);
  return forward(scope, x, rows, {}, {}, rows.view.dtype, weight, eps, offset, casting_mode);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_op(Tensor x, Tensor residual, OptionalTensor weight, double eps, double offset,
                                                   int64_t casting_mode) {
  const Scope scope("add_rms_norm", x);
  const RowsView rows = as_rows(scope, x), residual_rows = as_rows(scope, residual);
  const Dtype dtype = promote(rows.view.dtype, residual_rows.view.dtype);
  Tensor sum = allocate_like(scope, x, dtype);
  const auto [y, rstd] = forward(scope, x, rows, residual_rows, mutable_rows(sum), dtype, weight, eps, offset, casting_mode);
  return {y, sum, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward_op(Tensor dy, Tensor x, OptionalTensor weight, Tensor rstd, double offset, bool need_dx,
                                                bool need_dweight) {
  const Scope scope("rms_norm_backward", x);
  const NormGradients out(scope, x, weight, {}, column_count(x), need_dx, need_dweight, false);
  if (!out.complete(x)) norm_gradients<false>(scope, dy, {}, x, weight, {}, rstd, offset, out);
  return {out.dx, out.dweight};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward_op(OptionalTensor dy, OptionalTensor dsum, Tensor sum, OptionalTensor weight, Tensor rstd,
                                                    double offset, bool need_dx, bool need_dweight) {
  const Scope scope("add_rms_norm_backward", sum);
  NormGradients out(scope, sum, weight, {}, column_count(sum), need_dx, need_dweight, false);
  if (!dy) {  // Only the sum was used: its gradient passes through unchanged, as a new tensor.
    if (need_dx) copy_into(out.dx, *dsum);
    zero({out.dweight});
  } else if (!out.complete(sum)) {
    norm_gradients<false>(scope, *dy, dsum, sum, weight, {}, rstd, offset, out);
  }
  return {out.dx, out.dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("rms_norm", boxed<rms_norm_op, check_rms_norm>);
  m.impl("rms_norm_backward", boxed<rms_norm_backward_op, check_rms_norm_backward>);
  m.impl("add_rms_norm", boxed<add_rms_norm_op, check_add_rms_norm>);
  m.impl("add_rms_norm_backward", boxed<add_rms_norm_backward_op, check_add_rms_norm_backward>);
}

}  // namespace liger::LIGER_BACKEND
