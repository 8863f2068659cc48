// Arguments of fused_linear_cross_entropy.
#pragma once
#include "checks/cross_entropy.h"
#include "launch/chunks.h"

namespace liger::LIGER_BACKEND {

// Of the matmuls, of losses and statistics, and of the sum of dweight over chunks.
struct LossDtypes {
  Dtype compute, accumulator, sum;
};
inline LossDtypes loss_dtypes(const Tensor& x, const Tensor& weight, const std::optional<ScalarType>& accum_dtype,
                              const std::optional<ScalarType>& compute_dtype) {
  const Dtype promoted = promote(dtype_of(x, "x"), dtype_of(weight, "weight"));
  const Dtype compute = compute_dtype ? dtype_of(*compute_dtype, "compute_dtype", x) : promoted, made = accumulator(compute);
  return {compute, made, accum_dtype ? dtype_of(*accum_dtype, "accum_dtype", x) : made};
}

inline LossDtypes check_head(const char* op, const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                             const OptionalTensor& ce_weight, const std::optional<ScalarType>& accum_dtype,
                             const std::optional<ScalarType>& compute_dtype, const Size& chunk_rows) {
  check_defined(op, x, "x");
  require(x.dim() == 2, op, ": x has shape ", shape_text(x), ", expected (rows, hidden_size)");
  check_device(op, weight, "weight", x, "x");
  require(weight.dim() == 2 && weight.size(1) == x.size(1) && weight.size(0) > 0, op, ": weight has shape ", shape_text(weight),
          ", expected (vocab_size, ", x.size(1), ")");
  const LossDtypes dtypes = loss_dtypes(x, weight, accum_dtype, compute_dtype);
  require(dtypes.sum == dtypes.accumulator || dtypes.sum == dtypes.compute, op, ": accum_dtype is ", dtype_name(scalar_type(dtypes.sum)),
          ", expected ", dtype_name(scalar_type(dtypes.accumulator)), " or the dtype of the matmuls, ",
          dtype_name(scalar_type(dtypes.compute)));
  check_targets(op, target, ce_weight, "ce_weight", x.size(0), weight.size(0), dtypes.accumulator, x, "x");
  check_parameter(op, bias, "bias", weight.size(0), x, "x");
  require(chunk_rows != 0 && chunk_rows != INT64_MIN, op, ": chunk_rows is ", chunk_rows, ", expected a number of rows, or its negative");
  return dtypes;
}

inline void check_fused_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                                             const OptionalTensor& ce_weight, const OptionalTensor& normalizer, int64_t ignore_index,
                                             int64_t reduction, double label_smoothing, double lse_square_scale,
                                             const std::optional<double>& softcap, bool use_token_scaling, bool return_z_loss,
                                             bool return_token_accuracy, bool return_predicted_tokens,
                                             const std::optional<ScalarType>& accum_dtype, const std::optional<ScalarType>& compute_dtype,
                                             const Size& chunk_rows, bool need_dx, bool need_dweight, bool need_dbias) {
  const char* op = "fused_linear_cross_entropy";
  check_loss_options(op, reduction, label_smoothing, softcap);
  const LossDtypes dtypes = check_head(op, x, weight, target, bias, ce_weight, accum_dtype, compute_dtype, chunk_rows);
  if (!normalizer) return;
  check_device(op, *normalizer, "normalizer", x, "x");
  require(normalizer->numel() == 1 && type_of(*normalizer) == scalar_type(dtypes.accumulator), op,
          ": normalizer must be one number of dtype ", dtype_name(scalar_type(dtypes.accumulator)));
}

inline void check_fused_linear_cross_entropy_backward(const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
                                                      const OptionalTensor& bias, const OptionalTensor& ce_weight, const Tensor& counts,
                                                      const Tensor& saved, const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                                                      int64_t ignore_index, int64_t reduction, double label_smoothing,
                                                      double lse_square_scale, const std::optional<double>& softcap, bool use_token_scaling,
                                                      const std::optional<ScalarType>& accum_dtype,
                                                      const std::optional<ScalarType>& compute_dtype, const Size& chunk_rows, bool need_dx,
                                                      bool need_dweight, bool need_dbias) {
  const char* op = "fused_linear_cross_entropy_backward";
  check_loss_options(op, reduction, label_smoothing, softcap);
  const LossDtypes dtypes = check_head(op, x, weight, target, bias, ce_weight, accum_dtype, compute_dtype, chunk_rows);
  const Size rows = x.size(0), hidden = x.size(1), vocab = weight.size(0);
  check_loss_gradient(op, dloss, reduction, rows, x, "x");
  check_made(op, counts, "counts", {CrossEntropyCounts::slots}, dtypes.accumulator, x, "x");
  need_dbias = need_dbias && bias;
  const bool per_row = static_cast<Reduction>(reduction) == Reduction::none;
  const auto mode = launch::gradients_of(need_dx, need_dweight || need_dbias, rows, chunk_rows, per_row);
  if (mode == launch::Gradients::deferred) {
    check_device(op, saved, "saved", x, "x");
    check_shape(op, saved, "saved", {rows, vocab});
    require(type_of(saved) == scalar_type(dtypes.compute), op, ": saved has dtype ", dtype_name(type_of(saved)), ", expected ",
            dtype_name(scalar_type(dtypes.compute)));
  }
  if (mode != launch::Gradients::accumulated) return;
  if (need_dx) check_made(op, dx, "dx", {rows, hidden}, dtypes.compute, x, "x");
  if (need_dweight) check_made(op, dweight, "dweight", {vocab, hidden}, dtypes.sum, x, "x");
  if (need_dbias) check_made(op, dbias, "dbias", {vocab}, dtypes.accumulator, x, "x");
}

}  // namespace liger::LIGER_BACKEND
