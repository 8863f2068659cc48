// The ops group_norm and group_norm_backward.
#include "kernels/group_norm.h"

#include "checks/group_norm.h"
#include "ops/norms.h"

namespace liger::LIGER_BACKEND {
namespace {

GroupNormShape group_norm_shape(const Tensor& x, int64_t num_groups) {
  GroupNormShape shape{x.size(0), num_groups, x.size(1) / num_groups, 1};
  for (int64_t i = 2; i < x.dim(); ++i) shape.channel *= x.size(i);
  return shape;
}

Rows group_rows(const Tensor& t, const GroupNormShape& shape) { return {t.data_ptr(), shape.cols(), tensor_dtype(t)}; }
MutableRows mutable_groups(const Tensor& t, const GroupNormShape& shape) { return {t.data_ptr(), shape.cols(), tensor_dtype(t)}; }

std::tuple<Tensor, Tensor, Tensor> group_norm_op(Tensor x, OptionalTensor weight, OptionalTensor bias, int64_t num_groups, double eps) {
  const Scope scope("group_norm", x);
  const GroupNormShape shape = group_norm_shape(x, num_groups);
  x = contiguous(scope, x);
  weight = contiguous(scope, weight);
  bias = contiguous(scope, bias);

  Tensor y = allocate_like(scope, x);
  const Dtype stats = accumulator(tensor_dtype(x));
  Tensor mean = allocate(scope, {shape.batch, shape.groups}, stats, x), rstd = allocate(scope, {shape.batch, shape.groups}, stats, x);
  if (x.numel() == 0) {  // channels may have no elements
    zero({mean, rstd});
    return {y, mean, rstd};
  }
  GroupNormForward args{.shape = shape,
                        .x = group_rows(x, shape),
                        .weight = as_vector(weight),
                        .bias = as_vector(bias),
                        .y = mutable_groups(y, shape),
                        .mean = mean.data_ptr(),
                        .rstd = rstd.data_ptr(),
                        .eps = eps};
  const Tensor space = workspace(scope, group_norm_forward_workspace(args, scope), x);
  args.workspace = space.data_ptr();
  group_norm_forward(args, scope);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward_op(Tensor dy, Tensor x, OptionalTensor weight, Tensor mean, Tensor rstd,
                                                          std::optional<ScalarType> bias_dtype, int64_t num_groups, bool need_dx,
                                                          bool need_dweight, bool need_dbias) {
  const Scope scope("group_norm_backward", x);
  const GroupNormShape shape = group_norm_shape(x, num_groups);
  const NormGradients out(scope, x, weight, bias_dtype, shape.all_channels(), need_dx, need_dweight, need_dbias);
  if (out.complete(x)) return {out.dx, out.dweight, out.dbias};
  dy = contiguous(scope, dy);
  x = contiguous(scope, x);
  weight = contiguous(scope, weight);
  GroupNormBackward args{.shape = shape,
                         .dy = group_rows(dy, shape),
                         .x = group_rows(x, shape),
                         .weight = as_vector(weight),
                         .mean = mean.data_ptr(),
                         .rstd = rstd.data_ptr(),
                         .dx = need_dx ? mutable_groups(out.dx, shape) : MutableRows{},
                         .dweight = mutable_vector(out.dweight),
                         .dbias = mutable_vector(out.dbias)};
  const Tensor space = workspace(scope, group_norm_backward_workspace(args, scope), x);
  args.workspace = space.data_ptr();
  group_norm_backward(args, scope);
  return {out.dx, out.dweight, out.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("group_norm", boxed<group_norm_op, check_group_norm>);
  m.impl("group_norm_backward", boxed<group_norm_backward_op, check_group_norm_backward>);
}

}  // namespace liger::LIGER_BACKEND
