// Checks of the arguments of ops on one tensor of rows. The backward has dy and the saved tensor.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_row_gradient(const char* op, const Tensor& dy, const Tensor& kept, const char* name) {
  check_rows(op, kept, name);
  check_same(op, dy, "dy", kept, name);
}

}  // namespace liger::LIGER_BACKEND
