#include "kernels/norms.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

void check_weight(const char* op, const OptionalTensor& weight, const Tensor& x, const char* x_name, int64_t cols) {
  if (!weight) return;
  check_device(op, *weight, "weight", x, x_name);
  check_shape(op, *weight, "weight", {cols});
  dtype_of(*weight, "weight");
}

void check_casting_mode(const char* op, int64_t mode) {
  require(mode >= -1 && mode <= 1, op, ": casting_mode is ", mode, ", expected 0 (llama), 1 (gemma) or -1 (none)");
}

std::tuple<Tensor, Tensor> rms_norm_op(Tensor x, OptionalTensor weight, double eps, double offset, int64_t casting_mode) {
  const Scope scope("rms_norm", x, "x");
  const RowsView rows = as_rows(scope.op(), x, "x");
  check_weight(scope.op(), weight, x, "x", rows.cols);
  check_casting_mode(scope.op(), casting_mode);
  weight = contiguous(scope.op(), weight);

  Tensor y = allocate_like(scope, x);
  auto leading = sizes_of(x);
  leading.pop_back();
  Tensor rstd = allocate(scope, leading, accumulator(rows.view.dtype), x);
  if (x.numel() > 0)
    norm_forward(RmsNormForward{.rows = rows.rows,
                                .cols = rows.cols,
                                .x = rows,
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

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_op(Tensor x, Tensor residual, OptionalTensor weight, double eps, double offset,
                                                   int64_t casting_mode) {
  const Scope scope("add_rms_norm", x, "x");
  check_device(scope.op(), residual, "residual", x, "x");
  check_same_shape(scope.op(), residual, "residual", x, "x");
  const RowsView rows = as_rows(scope.op(), x, "x");
  const RowsView residual_rows = as_rows(scope.op(), residual, "residual");
  check_weight(scope.op(), weight, x, "x", rows.cols);
  check_casting_mode(scope.op(), casting_mode);
  weight = contiguous(scope.op(), weight);

  const Dtype dtype = promote(rows.view.dtype, residual_rows.view.dtype);
  Tensor y = allocate_like(scope, x, dtype), sum = allocate_like(scope, x, dtype);
  auto leading = sizes_of(x);
  leading.pop_back();
  Tensor rstd = allocate(scope, leading, accumulator(dtype), x);
  if (x.numel() > 0)
    norm_forward(RmsNormForward{.rows = rows.rows,
                                .cols = rows.cols,
                                .x = rows,
                                .residual = residual_rows,
                                .sum = mutable_rows(sum, "sum"),
                                .weight = vector_of(weight, "weight"),
                                .y = mutable_rows(y, "y"),
                                .rstd = rstd.data_ptr(),
                                .eps = eps,
                                .offset = offset,
                                .round_normalized = casting_mode == 0},
                 scope);
  else torch::stable::zero_(rstd);
  return {y, sum, rstd};
}

// Both backwards: z is what was normalised.
std::tuple<Tensor, Tensor> backward(const Scope& scope, const OptionalTensor& dy_in, const OptionalTensor& dsum, const Tensor& z,
                                    const char* z_name, OptionalTensor weight, const Tensor& rstd, double offset, bool need_dx,
                                    bool need_dweight) {
  const RowsView z_rows = as_rows(scope.op(), z, z_name);
  check_weight(scope.op(), weight, z, z_name, z_rows.cols);
  weight = contiguous(scope.op(), weight);
  need_dweight = need_dweight && weight.has_value();
  check_device(scope.op(), rstd, "rstd", z, z_name);
  require(rstd.numel() == z_rows.rows, scope.op(), ": rstd has ", rstd.numel(), " elements, expected one for each of ", z_rows.rows,
          " rows");
  const Tensor rstd_rows = contiguous(scope.op(), rstd);
  require(dtype_of(rstd, "rstd") == accumulator(z_rows.view.dtype), scope.op(), ": rstd has dtype ", dtype_name(type_of(rstd)),
          ", expected what the forward returned");

  // Only the sum was used: its gradient passes through unchanged (as a fresh tensor).
  if (!dy_in) {
    require(dsum.has_value(), scope.op(), ": neither dy nor dsum is given");
    check_device(scope.op(), *dsum, "dsum", z, z_name);
    check_same_shape(scope.op(), *dsum, "dsum", z, z_name);
    dtype_of(*dsum, "dsum");
    Tensor dz = need_dx ? allocate_like(scope, z) : empty_output(scope, z);
    if (need_dx) torch::stable::copy_(dz, *dsum);
    Tensor dweight = need_dweight ? allocate_like(scope, *weight) : empty_output(scope, weight ? *weight : z);
    torch::stable::zero_(dweight);
    return {dz, dweight};
  }
  check_same_shape(scope.op(), *dy_in, "dy", z, z_name);
  check_device(scope.op(), *dy_in, "dy", z, z_name);
  const RowsView dy = as_rows(scope.op(), *dy_in, "dy");
  RowsView dsum_rows;
  if (dsum) {
    check_same_shape(scope.op(), *dsum, "dsum", z, z_name);
    check_device(scope.op(), *dsum, "dsum", z, z_name);
    dsum_rows = as_rows(scope.op(), *dsum, "dsum");
  }

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
  return backward(Scope("rms_norm_backward", x, "x"), dy, std::nullopt, x, "x", weight, rstd, offset, need_dx, need_dweight);
}

std::tuple<Tensor, Tensor> add_rms_norm_backward_op(OptionalTensor dy, OptionalTensor dsum, Tensor sum, OptionalTensor weight, Tensor rstd,
                                                    double offset, bool need_dx, bool need_dweight) {
  return backward(Scope("add_rms_norm_backward", sum, "sum"), dy, dsum, sum, "sum", weight, rstd, offset, need_dx, need_dweight);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("rms_norm", boxed<rms_norm_op>);
  m.impl("rms_norm_backward", boxed<rms_norm_backward_op>);
  m.impl("add_rms_norm", boxed<add_rms_norm_op>);
  m.impl("add_rms_norm_backward", boxed<add_rms_norm_backward_op>);
}

}  // namespace liger::LIGER_BACKEND
