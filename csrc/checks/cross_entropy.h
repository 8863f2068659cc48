// Checks of the arguments of cross_entropy. fused_linear_cross_entropy, jsd and the ops of a sharded vocabulary share some of them.
#pragma once
#include "checks/named.h"
#include "checks/tensor.h"
#include "kernels/cross_entropy.h"

namespace liger::LIGER_BACKEND {

// The arguments that cross_entropy and fused_linear_cross_entropy share. The backwards alone have the last line: the gradient of the loss,
// and the forward's counts.
struct LossArguments {
  Tensor target;
  int64_t ignore_index = -100, reduction = 0;
  double label_smoothing = 0, lse_square_scale = 0, logit_scale = 1;
  std::optional<double> softcap;
  bool use_token_scaling = false, return_z_loss = false, return_token_accuracy = false, return_predicted_tokens = false;
  bool return_entropy = false, return_mean_logits = false, return_log_sum_sq = false;
  Tensor dloss, counts;

  using F = LossArguments;
  static constexpr auto members = std::tuple{Member{"target", &F::target},
                                             Member{"ignore_index", &F::ignore_index},
                                             Member{"reduction", &F::reduction},
                                             Member{"label_smoothing", &F::label_smoothing},
                                             Member{"lse_square_scale", &F::lse_square_scale},
                                             Member{"logit_scale", &F::logit_scale},
                                             Member{"softcap", &F::softcap},
                                             Member{"use_token_scaling", &F::use_token_scaling},
                                             Member{"return_z_loss", &F::return_z_loss},
                                             Member{"return_token_accuracy", &F::return_token_accuracy},
                                             Member{"return_predicted_tokens", &F::return_predicted_tokens},
                                             Member{"return_entropy", &F::return_entropy},
                                             Member{"return_mean_logits", &F::return_mean_logits},
                                             Member{"return_log_sum_sq", &F::return_log_sum_sq},
                                             Member{"dloss", &F::dloss},
                                             Member{"counts", &F::counts}};

  bool wants_moments() const { return return_entropy || return_mean_logits || return_log_sum_sq; }
};

struct CrossEntropyArguments : LossArguments {
  Tensor logits, lse;
  OptionalTensor weight;

  using F = CrossEntropyArguments;
  static constexpr auto members = std::tuple_cat(
      LossArguments::members, std::tuple{Member{"logits", &F::logits}, Member{"lse", &F::lse}, Member{"weight", &F::weight}});
};

inline void check_loss_options(const char* op, const LossArguments& a) {
  require(a.reduction >= 0 && a.reduction <= 2, op, ": reduction is ", a.reduction, ", expected 0 (none), 1 (mean) or 2 (sum)");
  require(a.label_smoothing >= 0 && a.label_smoothing <= 1, op, ": label_smoothing is ", a.label_smoothing,
          ", expected a number in [0, 1]");
  require(!a.softcap || (*a.softcap >= 1e-18 && *a.softcap <= 1e18), op, ": softcap is ", a.softcap.value_or(0),
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

inline void check_cross_entropy(const CrossEntropyArguments& a) {
  check_loss_options("cross_entropy", a);
  check_logits("cross_entropy", a.logits, a.target, a.weight);
}

inline void check_cross_entropy_backward(const CrossEntropyArguments& a) {
  const char* op = "cross_entropy_backward";
  check_loss_options(op, a);
  const Dtype accumulator_dtype = check_logits(op, a.logits, a.target, a.weight);
  check_loss_gradient(op, a.dloss, a.reduction, a.logits.size(0), a.logits, "logits");
  check_forward_result(op, a.lse, "lse", {2, a.logits.size(0)}, accumulator_dtype, a.logits, "logits");
  check_forward_result(op, a.counts, "counts", {CrossEntropyCounts::slots}, accumulator_dtype, a.logits, "logits");
}

}  // namespace liger::LIGER_BACKEND
