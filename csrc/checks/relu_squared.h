// Checks of the arguments of relu_squared.
#pragma once
#include "checks/rows.h"

namespace liger::LIGER_BACKEND {

inline void check_relu_squared(const Tensor& x) { check_rows("relu_squared", x, "x"); }
inline void check_relu_squared_backward(const Tensor& dy, const Tensor& x) { check_row_gradient("relu_squared_backward", dy, x, "x"); }

}  // namespace liger::LIGER_BACKEND
