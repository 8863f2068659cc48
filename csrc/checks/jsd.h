// Checks of the arguments of jsd.
#pragma once
#include "checks/cross_entropy.h"

namespace liger::LIGER_BACKEND {

inline void check_distributions(const char* op, const Tensor& log_q, const Tensor& log_p, const OptionalTensor& shift_labels, double beta) {
  require(beta >= 0 && beta <= 1, op, ": beta is ", beta, ", expected a number in [0, 1]");
  check_classes(op, log_q, "log_q");
  check_same(op, log_p, "log_p", log_q, "log_q");
  if (shift_labels) check_labels(op, *shift_labels, "shift_labels", log_q.size(0), log_q, "log_q");
}

inline void check_jsd(const Tensor& log_q, const Tensor& log_p, const OptionalTensor& shift_labels, double beta, int64_t ignore_index) {
  check_distributions("jsd", log_q, log_p, shift_labels, beta);
}

inline void check_jsd_backward(const Tensor& dloss, const Tensor& log_q, const Tensor& log_p, const OptionalTensor& shift_labels,
                               const Tensor& counts, double beta, int64_t ignore_index) {
  const char* op = "jsd_backward";
  check_distributions(op, log_q, log_p, shift_labels, beta);
  check_loss_gradient(op, dloss, int64_t(Reduction::mean), log_q.size(0), log_q, "log_q");
  check_forward_result(op, counts, "counts", {CrossEntropyCounts::slots}, accumulator(tensor_dtype(log_q, "log_q")), log_q, "log_q");
}

}  // namespace liger::LIGER_BACKEND
