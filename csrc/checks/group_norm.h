// Checks of the arguments of group_norm.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_groups(const char* op, const Tensor& x, int64_t num_groups) {
  check_defined(op, x, "x");
  require(x.dim() >= 2, op, ": x has shape ", shape_text(x), ", expected (batch, channels, ...)");
  check_dtype(op, x, "x");
  require(num_groups > 0 && x.size(1) % Size(num_groups) == Size(0), op, ": num_groups is ", num_groups, ", expected a divisor of the ",
          x.size(1), " channels of x");
}

inline void check_group_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, int64_t num_groups, double eps) {
  const char* op = "group_norm";
  check_groups(op, x, num_groups);
  check_parameter(op, weight, "weight", x.size(1), x, "x");
  check_parameter(op, bias, "bias", x.size(1), x, "x");
}

inline void check_group_norm_backward(const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& mean,
                                      const Tensor& rstd, const std::optional<ScalarType>& bias_dtype, int64_t num_groups, bool need_dx,
                                      bool need_dweight, bool need_dbias) {
  const char* op = "group_norm_backward";
  check_groups(op, x, num_groups);
  check_same(op, dy, "dy", x, "x");
  check_parameter(op, weight, "weight", x.size(1), x, "x");
  const Dtype statistics = accumulator(tensor_dtype(x, "x"));
  check_forward_result(op, mean, "mean", {x.size(0), num_groups}, statistics, x, "x");
  check_forward_result(op, rstd, "rstd", {x.size(0), num_groups}, statistics, x, "x");
  if (bias_dtype) check_dtype(op, *bias_dtype, "bias_dtype", x);
}

}  // namespace liger::LIGER_BACKEND
