#include "checks/norms.h"
#include "kernels/norms.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm_op(Tensor x, OptionalTensor weight, OptionalTensor bias, double eps) {
  const Scope scope("layer_norm", x);
  const RowsView rows = as_rows(scope.op(), x, "x");
  weight = contiguous(scope.op(), weight);
  bias = contiguous(scope.op(), bias);

  Tensor y = allocate_like(scope, x);
  Tensor mean = allocate_statistics(scope, x, rows.view.dtype), rstd = allocate_statistics(scope, x, rows.view.dtype);
  if (x.numel() == 0)  // rows without columns, perhaps
    for (Tensor* t : {&mean, &rstd}) torch::stable::zero_(*t);
  else
    norm_forward(LayerNormForward{.rows = rows.rows,
                                  .cols = rows.cols,
                                  .x = rows,
                                  .weight = vector_of(weight, "weight"),
                                  .bias = vector_of(bias, "bias"),
                                  .y = mutable_rows(y, "y"),
                                  .mean = mean.data_ptr(),
                                  .rstd = rstd.data_ptr(),
                                  .eps = eps},
                 scope);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_op(Tensor dy_in, Tensor x, OptionalTensor weight, Tensor mean, Tensor rstd,
                                                          std::optional<ScalarType> bias_dtype, bool need_dx, bool need_dweight,
                                                          bool need_dbias) {
  const Scope scope("layer_norm_backward", x);
  const RowsView rows = as_rows(scope.op(), x, "x");
  weight = contiguous(scope.op(), weight);
  need_dweight = need_dweight && weight.has_value();
  need_dbias = need_dbias && bias_dtype.has_value();
  mean = contiguous(scope.op(), mean);
  rstd = contiguous(scope.op(), rstd);

  Tensor dx = need_dx ? allocate_like(scope, x) : empty_output(scope, x);
  Tensor dweight = need_dweight ? allocate_like(scope, *weight) : empty_output(scope, weight ? *weight : x);
  const ScalarType dbias_type = bias_dtype.value_or(type_of(x));
  Tensor dbias = allocate(scope, {need_dbias ? rows.cols : 0}, dbias_type, x);
  if (!need_dx && !need_dweight && !need_dbias) return {dx, dweight, dbias};
  if (x.numel() == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dweight, dbias};
  }
  const RowsView dy = as_rows(scope.op(), dy_in, "dy");
  LayerNormBackward args{.rows = rows.rows,
                         .cols = rows.cols,
                         .dy = dy,
                         .z = rows,
                         .weight = vector_of(weight, "weight"),
                         .mean = mean.data_ptr(),
                         .rstd = rstd.data_ptr()};
  if (need_dx) args.dz = mutable_rows(dx, "dx");
  if (need_dweight) args.dweight = {dweight.data_ptr(), dtype_of(dweight, "weight")};
  if (need_dbias) args.dbias = {dbias.data_ptr(), dtype_of(dbias, "bias")};
  const Tensor space = workspace(scope, norm_backward_workspace(args, scope), x);
  args.workspace = space.data_ptr();
  norm_backward(args, scope);
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("layer_norm", boxed<layer_norm_op, check_layer_norm>);
  m.impl("layer_norm_backward", boxed<layer_norm_backward_op, check_layer_norm_backward>);
}

}  // namespace liger::LIGER_BACKEND
