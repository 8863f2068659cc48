// The check of the backward's arguments, for ops that map each row of one tensor to a row of the same length (softmax, relu_squared): dy,
// and the tensor that the forward saved.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_row_gradient(const char* op, const Tensor& dy, const Tensor& saved, const char* name) {
  check_rows(op, saved, name);
  check_same(op, dy, "dy", saved, name);
}

}  // namespace liger::LIGER_BACKEND
