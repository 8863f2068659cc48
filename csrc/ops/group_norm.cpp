#include "kernels/group_norm.h"

#include "checks/group_norm.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

GroupNormShape shape_of(const Tensor& x, int64_t num_groups) {
  GroupNormShape shape{x.size(0), num_groups, x.size(1) / num_groups, 1};
  for (int64_t i = 2; i < x.dim(); ++i) shape.channel *= x.size(i);
  return shape;
}

Rows groups_of(const Tensor& t, const GroupNormShape& shape, const char* name) { return {t.data_ptr(), shape.cols(), dtype_of(t, name)}; }
MutableRows mutable_groups(const Tensor& t, const GroupNormShape& shape, const char* name) {
  return {t.data_ptr(), shape.cols(), dtype_of(t, name)};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_op(Tensor x, OptionalTensor weight, OptionalTensor bias, int64_t num_groups, double eps) {
  const Scope scope("group_norm", x);
  const GroupNormShape shape = shape_of(x, num_groups);
  x = contiguous(scope.op(), x);
  weight = contiguous(scope.op(), weight);
  bias = contiguous(scope.op(), bias);

  Tensor y = allocate_like(scope, x);
  const Dtype stats = accumulator(dtype_of(x, "x"));
  Tensor mean = allocate(scope, {shape.batch, shape.groups}, stats, x), rstd = allocate(scope, {shape.batch, shape.groups}, stats, x);
  if (x.numel() == 0) {  // channels without elements, perhaps
    for (Tensor* t : {&mean, &rstd}) torch::stable::zero_(*t);
    return {y, mean, rstd};
  }
  GroupNormForward args{shape,
                        groups_of(x, shape, "x"),
                        vector_of(weight, "weight"),
                        vector_of(bias, "bias"),
                        mutable_groups(y, shape, "y"),
                        mean.data_ptr(),
                        rstd.data_ptr(),
                        eps,
                        nullptr};
  const Tensor space = workspace(scope, group_norm_forward_workspace(args, scope), x);
  args.workspace = space.data_ptr();
  group_norm_forward(args, scope);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward_op(Tensor dy, Tensor x, OptionalTensor weight, Tensor mean, Tensor rstd,
                                                          std::optional<ScalarType> bias_dtype, int64_t num_groups, bool need_dx,
                                                          bool need_dweight, bool need_dbias) {
  const Scope scope("group_norm_backward", x);
  const GroupNormShape shape = shape_of(x, num_groups);
  need_dweight = need_dweight && weight.has_value();
  need_dbias = need_dbias && bias_dtype.has_value();
  dy = contiguous(scope.op(), dy);
  x = contiguous(scope.op(), x);
  weight = contiguous(scope.op(), weight);

  Tensor dx = need_dx ? allocate_like(scope, x) : empty_output(scope, x);
  Tensor dweight = need_dweight ? allocate_like(scope, *weight) : empty_output(scope, weight ? *weight : x);
  Tensor dbias = allocate(scope, {need_dbias ? shape.all_channels() : 0}, bias_dtype.value_or(type_of(x)), x);
  if (!need_dx && !need_dweight && !need_dbias) return {dx, dweight, dbias};
  if (x.numel() == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dweight, dbias};
  }
  GroupNormBackward args{shape,
                         groups_of(dy, shape, "dy"),
                         groups_of(x, shape, "x"),
                         vector_of(weight, "weight"),
                         mean.data_ptr(),
                         rstd.data_ptr(),
                         {},
                         {},
                         {},
                         nullptr};
  if (need_dx) args.dx = mutable_groups(dx, shape, "dx");
  if (need_dweight) args.dweight = {dweight.data_ptr(), dtype_of(dweight, "weight")};
  if (need_dbias) args.dbias = {dbias.data_ptr(), dtype_of(dbias, "bias")};
  const Tensor space = workspace(scope, group_norm_backward_workspace(args, scope), x);
  args.workspace = space.data_ptr();
  group_norm_backward(args, scope);
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("group_norm", boxed<group_norm_op, check_group_norm>);
  m.impl("group_norm_backward", boxed<group_norm_backward_op, check_group_norm_backward>);
}

}  // namespace liger::LIGER_BACKEND
