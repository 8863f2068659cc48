// Arguments of fused_linear_cross_entropy.
#pragma once
#include "checks/cross_entropy.h"
#include "checks/head.h"

namespace liger::LIGER_BACKEND {

inline void check_fused_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                                             const OptionalTensor& ce_weight, const OptionalTensor& normalizer, int64_t ignore_index,
                                             int64_t reduction, double label_smoothing, double lse_square_scale,
                                             const std::optional<double>& softcap, bool use_token_scaling, bool return_z_loss,
                                             bool return_token_accuracy, bool return_predicted_tokens,
                                             const std::optional<ScalarType>& accum_dtype, const std::optional<ScalarType>& compute_dtype,
                                             int64_t gradients, const Size& chunk_rows, const Size& chunk_classes, bool need_dx,
                                             bool need_dweight, bool need_dbias) {
  const char* op = "fused_linear_cross_entropy";
  check_loss_options(op, reduction, label_smoothing, softcap);
  const HeadDtypes dtypes = check_head(op, x, weight, bias, accum_dtype, compute_dtype);
  check_targets(op, target, ce_weight, "ce_weight", x.size(0), weight.size(0), dtypes.acc, x, "x");
  check_schedule(op, x, weight, dtypes, gradients, chunk_rows, chunk_classes, need_dx, need_dweight, need_dbias && bias);
  if (!normalizer) return;
  check_device(op, *normalizer, "normalizer", x, "x");
  require(normalizer->numel() == 1 && type_of(*normalizer) == scalar_type(dtypes.acc), op, ": normalizer must be one number of dtype ",
          dtype_name(scalar_type(dtypes.acc)));
}

inline void check_fused_linear_cross_entropy_gradients(const char* op, const Tensor& dloss, const Tensor& x, const Tensor& weight,
                                                       const Tensor& target, const OptionalTensor& bias, const OptionalTensor& ce_weight,
                                                       const Tensor& counts, const Tensor& saved, const Tensor& dx, const Tensor& dweight,
                                                       const Tensor& dbias, int64_t ignore_index, int64_t reduction, double label_smoothing,
                                                       double lse_square_scale, const std::optional<double>& softcap,
                                                       bool use_token_scaling, const std::optional<ScalarType>& accum_dtype,
                                                       const std::optional<ScalarType>& compute_dtype, int64_t gradients,
                                                       const Size& chunk_rows, const Size& chunk_classes, bool need_dx, bool need_dweight,
                                                       bool need_dbias) {
  check_loss_options(op, reduction, label_smoothing, softcap);
  const HeadDtypes dtypes = check_head(op, x, weight, bias, accum_dtype, compute_dtype);
  check_targets(op, target, ce_weight, "ce_weight", x.size(0), weight.size(0), dtypes.acc, x, "x");
  check_schedule(op, x, weight, dtypes, gradients, chunk_rows, chunk_classes, need_dx, need_dweight, need_dbias && bias);
  check_loss_gradient(op, dloss, reduction, x.size(0), x, "x");
  const Size rows = x.size(0), vocab = weight.size(0), stored = chunk_classes < vocab ? chunk_classes : vocab;
  const bool makes_again = launch::Gradients(gradients) == launch::Gradients::overlaid && stored < vocab;
  check_made(op, counts, "counts",
             {Size(int64_t(CrossEntropyCounts::slots)) + (makes_again ? launch::kept_for_gradients(rows, use_token_scaling) : Size(0))},
             dtypes.acc, x, "x");
  check_gradient_sums(op, x, weight, dtypes, gradients, stored, saved, dx, dweight, dbias, need_dx, need_dweight, need_dbias && bias);
}

inline void check_fused_linear_cross_entropy_backward(const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
                                                      const OptionalTensor& bias, const OptionalTensor& ce_weight, const Tensor& counts,
                                                      const Tensor& saved, const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                                                      int64_t ignore_index, int64_t reduction, double label_smoothing,
                                                      double lse_square_scale, const std::optional<double>& softcap, bool use_token_scaling,
                                                      const std::optional<ScalarType>& accum_dtype,
                                                      const std::optional<ScalarType>& compute_dtype, int64_t gradients,
                                                      const Size& chunk_rows, const Size& chunk_classes, bool need_dx, bool need_dweight,
                                                      bool need_dbias) {
  check_fused_linear_cross_entropy_gradients("fused_linear_cross_entropy_backward", dloss, x, weight, target, bias, ce_weight, counts,
                                             saved, dx, dweight, dbias, ignore_index, reduction, label_smoothing, lse_square_scale, softcap,
                                             use_token_scaling, accum_dtype, compute_dtype, gradients, chunk_rows, chunk_classes, need_dx,
                                             need_dweight, need_dbias);
}

// dweight, which the forward returned, becomes the gradient; saved may be overwritten.
inline void check_fused_linear_cross_entropy_backward_in_place(
    const Tensor& dweight, const Tensor& saved, const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
    const OptionalTensor& bias, const OptionalTensor& ce_weight, const Tensor& counts, const Tensor& dx, const Tensor& dbias,
    int64_t ignore_index, int64_t reduction, double label_smoothing, double lse_square_scale, const std::optional<double>& softcap,
    bool use_token_scaling, const std::optional<ScalarType>& accum_dtype, const std::optional<ScalarType>& compute_dtype, int64_t gradients,
    const Size& chunk_rows, const Size& chunk_classes, bool need_dx, bool need_dweight, bool need_dbias) {
  const char* op = "fused_linear_cross_entropy_backward_";
  check_fused_linear_cross_entropy_gradients(op, dloss, x, weight, target, bias, ce_weight, counts, saved, dx, dweight, dbias, ignore_index,
                                             reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling, accum_dtype,
                                             compute_dtype, gradients, chunk_rows, chunk_classes, need_dx, need_dweight, need_dbias);
  const auto way = launch::Gradients(gradients);
  require((way == launch::Gradients::accumulated || way == launch::Gradients::overlaid) && need_dweight, op, ": gradients is ", gradients,
          " and need_dweight ", need_dweight,
          ", expected 2 (accumulated) or 4 (overlaid), and true: nothing else makes dweight where it is");
}

}  // namespace liger::LIGER_BACKEND
