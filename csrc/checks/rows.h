// Checks of the arguments of ops on one tensor of rows. The backward has dy and the saved tensor.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_row_gradient(const char* op, const Tensor& dy, const Tensor& saved, const char* name) {
  check_rows(op, saved, name);
  check_same(op, dy, "dy", saved, name);
}

}  // namespace liger::LIGER_BACKEND
