// Checks of the arguments of cross_entropy. fused_linear_cross_entropy, jsd and the ops of a sharded vocabulary share some of them.
#pragma once
#include "checks/tensor.h"
#include "kernels/cross_entropy.h"

namespace liger::LIGER_BACKEND {

inline void check_loss_options(const char* op, int64_t reduction, double label_smoothing, const std::optional<double>& softcap) {
  require(reduction >= 0 && reduction <= 2, op, ": reduction is ", reduction, ", expected 0 (none), 1 (mean) or 2 (sum)");
  require(label_smoothing >= 0 && label_smoothing <= 1, op, ": label_smoothing is ", label_smoothing, ", expected a number in [0, 1]");
  require(!softcap || (*softcap >= 1e-18 && *softcap <= 1e18), op, ": softcap is ", softcap.value_or(0),
          ", expected None or a number from 1e-18 to 1e18");
}

// Labels or targets: one for each row.
inline void check_labels(const char* op, const Tensor& labels, const char* name, const Size& rows, const Tensor& like,
                         const char* like_name) {
  check_device(op, labels, name, like, like_name);
  require(tensor_type(labels) == ScalarType::Long, op, ": ", name, " has dtype ", dtype_name(tensor_type(labels)),
          ", expected torch.int64");
  check_shape(op, labels, name, {rows});
}

inline void check_targets(const char* op, const Tensor& target, const OptionalTensor& weight, const char* weight_name, const Size& rows,
                          const Size& vocab, Dtype accumulator, const Tensor& like, const char* like_name) {
  check_labels(op, target, "target", rows, like, like_name);
  if (!weight) return;
  check_device(op, *weight, weight_name, like, like_name);
  check_shape(op, *weight, weight_name, {vocab});
  require(tensor_type(*weight) == scalar_type(accumulator), op, ": ", weight_name, " has dtype ", dtype_name(tensor_type(*weight)),
          ", expected ", dtype_name(scalar_type(accumulator)));
}

inline void check_loss_gradient(const char* op, const Tensor& dloss, int64_t reduction, const Size& rows, const Tensor& like,
                                const char* like_name) {
  check_device(op, dloss, "dloss", like, like_name);
  const bool per_row = static_cast<Reduction>(reduction) == Reduction::none;
  require(dloss.numel() == (per_row ? rows : 1), op, ": dloss has shape ", shape_text(dloss), ", expected that of the loss");
  check_dtype(op, dloss, "dloss");
}

// A matrix with a row per token and a column per class: logits or log-probabilities.
inline Dtype check_classes(const char* op, const Tensor& t, const char* name) {
  check_defined(op, t, name);
  require(t.dim() == 2 && t.size(1) > 0, op, ": ", name, " has shape ", shape_text(t), ", expected (rows, vocab_size) with vocab_size > 0");
  return check_dtype(op, t, name);
}

inline Dtype check_logits(const char* op, const Tensor& logits, const Tensor& target, const OptionalTensor& weight) {
  const Dtype accumulator_dtype = accumulator(check_classes(op, logits, "logits"));
  check_targets(op, target, weight, "weight", logits.size(0), logits.size(1), accumulator_dtype, logits, "logits");
  return accumulator_dtype;
}

inline void check_cross_entropy(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                                int64_t reduction, double label_smoothing, double lse_square_scale, const std::optional<double>& softcap,
                                bool return_z_loss, bool return_token_accuracy, bool return_predicted_tokens) {
  const char* op = "cross_entropy";
  check_loss_options(op, reduction, label_smoothing, softcap);
  check_logits(op, logits, target, weight);
}

inline void check_cross_entropy_backward(const Tensor& dloss, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                                         const Tensor& lse, const Tensor& counts, int64_t ignore_index, int64_t reduction,
                                         double label_smoothing, double lse_square_scale, const std::optional<double>& softcap) {
  const char* op = "cross_entropy_backward";
  check_loss_options(op, reduction, label_smoothing, softcap);
  const Dtype accumulator_dtype = check_logits(op, logits, target, weight);
  check_loss_gradient(op, dloss, reduction, logits.size(0), logits, "logits");
  check_forward_result(op, lse, "lse", {2, logits.size(0)}, accumulator_dtype, logits, "logits");
  check_forward_result(op, counts, "counts", {CrossEntropyCounts::slots}, accumulator_dtype, logits, "logits");
}

}  // namespace liger::LIGER_BACKEND
