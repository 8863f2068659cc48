#include "checks/norms.h"
#include "kernels/norms.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

// Both forwards: y and rstd of x, or of x + residual, which goes to `sum`.
std::tuple<Tensor, Tensor> forward(const Scope& scope, const Tensor& x, const RowsView& rows, const Rows& residual, const MutableRows& sum,
                                   Dtype dtype, const OptionalTensor& given, double eps, double offset, int64_t casting_mode) {
  const OptionalTensor weight = contiguous(scope.op(), given);
  Tensor y = allocate_like(scope, x, dtype), rstd = allocate_statistics(scope, x, dtype);
  if (x.numel() > 0)
    norm_forward(RmsNormForward{.rows = rows.rows,
                                .cols = rows.cols,
                                .x = rows,
                                .residual = residual,
                                .sum = sum,
                                .weight = vector_of(weight, "weight"),
                                .y = mutable_rows(y, "y"),
                                .rstd = rstd.data_ptr(),
                                .eps = eps,
                                .offset = offset,
                                .round_normalized = casting_mode == 0},
                 scope);
  else torch::stable::zero_(rstd);  // of rows without columns
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_op(Tensor x, OptionalTensor weight, double eps, double offset, int64_t casting_mode) {
  const Scope scope("rms_norm", x);
  const RowsView rows = as_rows(scope.op(), x, "x");
  return forward(scope, x, rows, {}, {}, rows.view.dtype, weight, eps, offset, casting_mode);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_op(Tensor x, Tensor residual, OptionalTensor weight, double eps, double offset,
                                                   int64_t casting_mode) {
  const Scope scope("add_rms_norm", x);
  const RowsView rows = as_rows(scope.op(), x, "x"), residual_rows = as_rows(scope.op(), residual, "residual");
  const Dtype dtype = promote(rows.view.dtype, residual_rows.view.dtype);
  Tensor sum = allocate_like(scope, x, dtype);
  const auto [y, rstd] = forward(scope, x, rows, residual_rows, mutable_rows(sum, "sum"), dtype, weight, eps, offset, casting_mode);
  return {y, sum, rstd};
}

// Both backwards: z is what was normalised.
std::tuple<Tensor, Tensor> backward(const Scope& scope, const OptionalTensor& dy_in, const OptionalTensor& dsum, const Tensor& z,
                                    OptionalTensor weight, const Tensor& rstd, double offset, bool need_dx, bool need_dweight) {
  const RowsView z_rows = as_rows(scope.op(), z, "z");
  weight = contiguous(scope.op(), weight);
  need_dweight = need_dweight && weight.has_value();
  const Tensor rstd_rows = contiguous(scope.op(), rstd);

  // Only the sum was used: its gradient passes through unchanged (as a fresh tensor).
  if (!dy_in) {
    Tensor dz = need_dx ? allocate_like(scope, z) : empty_output(scope, z);
    if (need_dx) torch::stable::copy_(dz, *dsum);
    Tensor dweight = need_dweight ? allocate_like(scope, *weight) : empty_output(scope, weight ? *weight : z);
    torch::stable::zero_(dweight);
    return {dz, dweight};
  }
  const RowsView dy = as_rows(scope.op(), *dy_in, "dy");
  RowsView dsum_rows;
  if (dsum) dsum_rows = as_rows(scope.op(), *dsum, "dsum");

  Tensor dz = need_dx ? allocate_like(scope, z) : empty_output(scope, z);
  Tensor dweight = need_dweight ? allocate_like(scope, *weight) : empty_output(scope, weight ? *weight : z);
  if (!need_dx && !need_dweight) return {dz, dweight};
  if (z.numel() == 0) {
    if (need_dweight) torch::stable::zero_(dweight);
    return {dz, dweight};
  }
  RmsNormBackward args{.rows = z_rows.rows,
                       .cols = z_rows.cols,
                       .dy = dy,
                       .dsum = dsum_rows,
                       .z = z_rows,
                       .weight = vector_of(weight, "weight"),
                       .rstd = rstd_rows.data_ptr(),
                       .offset = offset};
  if (need_dx) args.dz = mutable_rows(dz, "dx");
  if (need_dweight) args.dweight = {dweight.data_ptr(), dtype_of(dweight, "weight")};
  const Tensor space = workspace(scope, norm_backward_workspace(args, scope), z);
  args.workspace = space.data_ptr();
  norm_backward(args, scope);
  return {dz, dweight};
}

std::tuple<Tensor, Tensor> rms_norm_backward_op(Tensor dy, Tensor x, OptionalTensor weight, Tensor rstd, double offset, bool need_dx,
                                                bool need_dweight) {
  return backward(Scope("rms_norm_backward", x), dy, std::nullopt, x, weight, rstd, offset, need_dx, need_dweight);
}

std::tuple<Tensor, Tensor> add_rms_norm_backward_op(OptionalTensor dy, OptionalTensor dsum, Tensor sum, OptionalTensor weight, Tensor rstd,
                                                    double offset, bool need_dx, bool need_dweight) {
  return backward(Scope("add_rms_norm_backward", sum), dy, dsum, sum, weight, rstd, offset, need_dx, need_dweight);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("rms_norm", boxed<rms_norm_op, check_rms_norm>);
  m.impl("rms_norm_backward", boxed<rms_norm_backward_op, check_rms_norm_backward>);
  m.impl("add_rms_norm", boxed<add_rms_norm_op, check_add_rms_norm>);
  m.impl("add_rms_norm_backward", boxed<add_rms_norm_backward_op, check_add_rms_norm_backward>);
}

}  // namespace liger::LIGER_BACKEND
