// The ops layer_norm and layer_norm_backward.
#include "checks/norms.h"
#include "ops/norms.h"

namespace liger::LIGER_BACKEND {
namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm_op(Tensor x, OptionalTensor weight, OptionalTensor bias, double eps) {
  const Scope scope("layer_norm", x);
  const RowsView rows = as_rows(scope, x);
  weight = contiguous(scope, weight);
  bias = contiguous(scope, bias);

  Tensor y = allocate_like(scope, x);
  Tensor mean = allocate_statistics(scope, x, rows.view.dtype), rstd = allocate_statistics(scope, x, rows.view.dtype);
  if (x.numel() > 0)
    norm_forward(LayerNormForward{.rows = rows.rows,
                                  .cols = rows.cols,
                                  .x = rows,
                                  .weight = as_vector(weight),
                                  .bias = as_vector(bias),
                                  .y = mutable_rows(y),
                                  .mean = mean.data_ptr(),
                                  .rstd = rstd.data_ptr(),
                                  .eps = eps},
                 scope);
  else zero({mean, rstd});  // of rows without columns
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_op(Tensor dy, Tensor x, OptionalTensor weight, Tensor mean, Tensor rstd,
                                                          std::optional<ScalarType> bias_dtype, bool need_dx, bool need_dweight,
                                                          bool need_dbias) {
  const Scope scope("layer_norm_backward", x);
  const NormGradients out(scope, x, weight, bias_dtype, column_count(x), need_dx, need_dweight, need_dbias);
  if (!out.complete(x)) norm_gradients<true>(scope, dy, {}, x, weight, mean, rstd, 0, out);
  return {out.dx, out.dweight, out.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("layer_norm", boxed<layer_norm_op, check_layer_norm>);
  m.impl("layer_norm_backward", boxed<layer_norm_backward_op, check_layer_norm_backward>);
}

}  // namespace liger::LIGER_BACKEND
