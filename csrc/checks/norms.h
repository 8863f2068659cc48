// Checks of the arguments of rms_norm, add_rms_norm and layer_norm.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_casting_mode(const char* op, int64_t mode) {
  require(mode >= -1 && mode <= 1, op, ": casting_mode is ", mode, ", expected 0 (llama), 1 (gemma) or -1 (none)");
}

// A statistic of each row that the forward returned: mean or rstd.
inline void check_statistic(const char* op, const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  check_device(op, t, name, like, like_name);
  require(t.numel() == row_count(like) && tensor_type(t) == scalar_type(accumulator(tensor_dtype(like, like_name))), op, ": ", name,
          " is not what the forward returned for ", like_name, " of shape ", shape_text(like));
}

inline void check_rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset, int64_t casting_mode) {
  const char* op = "rms_norm";
  check_rows(op, x, "x");
  check_parameter(op, weight, "weight", column_count(x), x, "x");
  check_casting_mode(op, casting_mode);
}

inline void check_add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double offset,
                               int64_t casting_mode) {
  const char* op = "add_rms_norm";
  check_rows(op, x, "x");
  check_like(op, residual, "residual", x, "x");
  check_parameter(op, weight, "weight", column_count(x), x, "x");
  check_casting_mode(op, casting_mode);
}

inline void check_rms_norm_backward(const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd, double offset,
                                    bool need_dx, bool need_dweight) {
  const char* op = "rms_norm_backward";
  check_rows(op, x, "x");
  check_like(op, dy, "dy", x, "x");
  check_parameter(op, weight, "weight", column_count(x), x, "x");
  check_statistic(op, rstd, "rstd", x, "x");
}

inline void check_add_rms_norm_backward(const OptionalTensor& dy, const OptionalTensor& dsum, const Tensor& sum,
                                        const OptionalTensor& weight, const Tensor& rstd, double offset, bool need_dx, bool need_dweight) {
  const char* op = "add_rms_norm_backward";
  check_rows(op, sum, "sum");
  require(dy || dsum, op, ": dy and dsum are None, expected at least one of them");
  if (dy) check_like(op, *dy, "dy", sum, "sum");
  if (dsum) check_like(op, *dsum, "dsum", sum, "sum");
  check_parameter(op, weight, "weight", column_count(sum), sum, "sum");
  check_statistic(op, rstd, "rstd", sum, "sum");
}

inline void check_layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const char* op = "layer_norm";
  check_rows(op, x, "x");
  check_parameter(op, weight, "weight", column_count(x), x, "x");
  check_parameter(op, bias, "bias", column_count(x), x, "x");
}

inline void check_layer_norm_backward(const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& mean,
                                      const Tensor& rstd, const std::optional<ScalarType>& bias_dtype, bool need_dx, bool need_dweight,
                                      bool need_dbias) {
  const char* op = "layer_norm_backward";
  check_rows(op, x, "x");
  check_like(op, dy, "dy", x, "x");
  check_parameter(op, weight, "weight", column_count(x), x, "x");
  check_statistic(op, mean, "mean", x, "x");
  check_statistic(op, rstd, "rstd", x, "x");
  if (bias_dtype) check_dtype(op, *bias_dtype, "bias_dtype", x);
}

}  // namespace liger::LIGER_BACKEND
