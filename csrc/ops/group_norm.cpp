#include "kernels/group_norm.h"

#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

GroupNormShape check_groups(const char* op, const Tensor& x, int64_t num_groups) {
  check_defined(op, x, "x");
  require(x.dim() >= 2, op, ": x has shape ", shape_text(x), ", expected (batch, channels, ...)");
  dtype_of(x, "x");
  const int64_t channels = x.size(1);
  require(num_groups > 0 && channels % num_groups == 0, op, ": num_groups is ", num_groups, ", expected a divisor of the ", channels,
          " channels of x");
  GroupNormShape shape{x.size(0), num_groups, channels / num_groups, 1};
  for (int64_t i = 2; i < x.dim(); ++i) shape.channel *= x.size(i);
  return shape;
}

void check_parameter(const char* op, const OptionalTensor& parameter, const char* name, const Tensor& x) {
  if (!parameter) return;
  check_device(op, *parameter, name, x, "x");
  check_shape(op, *parameter, name, {x.size(1)});
  dtype_of(*parameter, name);
}

Rows groups_of(const Tensor& t, const GroupNormShape& shape, const char* name) { return {t.data_ptr(), shape.cols(), dtype_of(t, name)}; }
MutableRows mutable_groups(const Tensor& t, const GroupNormShape& shape, const char* name) {
  return {t.data_ptr(), shape.cols(), dtype_of(t, name)};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_op(Tensor x, OptionalTensor weight, OptionalTensor bias, int64_t num_groups, double eps) {
  const Scope scope("group_norm", x, "x");
  const GroupNormShape shape = check_groups(scope.op(), x, num_groups);
  check_parameter(scope.op(), weight, "weight", x);
  check_parameter(scope.op(), bias, "bias", x);
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
  const Scope scope("group_norm_backward", x, "x");
  const GroupNormShape shape = check_groups(scope.op(), x, num_groups);
  check_same_shape(scope.op(), dy, "dy", x, "x");
  check_device(scope.op(), dy, "dy", x, "x");
  require(type_of(dy) == type_of(x), scope.op(), ": dy has dtype ", dtype_name(type_of(dy)), ", expected that of x, ",
          dtype_name(type_of(x)));
  check_parameter(scope.op(), weight, "weight", x);
  need_dweight = need_dweight && weight.has_value();
  need_dbias = need_dbias && bias_dtype.has_value();
  const Dtype stats = accumulator(dtype_of(x, "x"));
  for (const auto& [t, name] : {std::pair{&mean, "mean"}, std::pair{&rstd, "rstd"}})
    require(t->defined() && t->numel() == shape.rows() && dtype_of(*t, name) == stats && t->is_contiguous(), scope.op(), ": ", name,
            " is not what the forward returned for x of shape ", shape_text(x));
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
  m.impl("group_norm", boxed<group_norm_op>);
  m.impl("group_norm_backward", boxed<group_norm_backward_op>);
}

}  // namespace liger::LIGER_BACKEND
