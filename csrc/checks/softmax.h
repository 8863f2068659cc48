// Checks of the arguments of softmax.
#pragma once
#include "checks/rows.h"

namespace liger::LIGER_BACKEND {

inline void check_softmax(const Tensor& x) { check_rows("softmax", x, "x"); }
inline void check_softmax_backward(const Tensor& dy, const Tensor& y) { check_row_gradient("softmax_backward", dy, y, "y"); }

}  // namespace liger::LIGER_BACKEND
