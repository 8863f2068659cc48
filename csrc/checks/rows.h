// Arguments of the ops of one tensor of rows: softmax, relu_squared.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_softmax(const Tensor& x) { check_rows("softmax", x, "x"); }
inline void check_relu_squared(const Tensor& x) { check_rows("relu_squared", x, "x"); }

inline void check_row_gradient(const char* op, const Tensor& dy, const Tensor& kept, const char* name) {
  check_rows(op, kept, name);
  check_same(op, dy, "dy", kept, name);
}
inline void check_softmax_backward(const Tensor& dy, const Tensor& y) { check_row_gradient("softmax_backward", dy, y, "y"); }
inline void check_relu_squared_backward(const Tensor& dy, const Tensor& x) { check_row_gradient("relu_squared_backward", dy, x, "x"); }

}  // namespace liger::LIGER_BACKEND
