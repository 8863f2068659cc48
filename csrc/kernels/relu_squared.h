// Squared ReLU: y = max(x, 0)^2, dx = 2 * max(x, 0) * dy; arXiv:2109.08668. Where x is NaN, y and dx are NaN. Where x <= 0, dx is 0 even if
// dy is NaN.
#pragma once
#include "kernels/types.h"

namespace liger {

struct ReluSquaredForward {
  int64_t rows, cols;
  Rows x;
  MutableRows y;
};
struct ReluSquaredBackward {
  int64_t rows, cols;
  Rows dy, x;
  MutableRows dx;
};

namespace LIGER_BACKEND {
void relu_squared_forward(const ReluSquaredForward&, Stream);
void relu_squared_backward(const ReluSquaredBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
