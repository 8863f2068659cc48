// Softmax over contiguous rows: y = exp(x - max) / sum(exp(x - max)); backward dx = y * (dy - sum(dy * y)).
#pragma once
#include "kernels/types.h"

namespace liger {

struct SoftmaxForward {
  int64_t rows, cols;
  Rows x;
  MutableRows y;
};
struct SoftmaxBackward {
  int64_t rows, cols;
  Rows dy, y;
  MutableRows dx;
};

namespace LIGER_BACKEND {
void softmax_forward(const SoftmaxForward&, Stream);
void softmax_backward(const SoftmaxBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
