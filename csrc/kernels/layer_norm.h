// LayerNorm: y = (x - mean) * rstd * weight + bias; arXiv:1607.06450.
#pragma once
#include "kernels/types.h"

namespace liger {

struct LayerNormForward {
  int64_t rows, cols;
  Rows x;
  Vector weight, bias;  // either may be absent
  MutableRows y;
  void *mean, *rstd;    // [rows] in accumulator(x.dtype)
  double eps;
};

// With n = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - mean(g) - n * mean(g * n)),  dweight = sum over rows of dy * n,  dbias = sum over rows of dy.
struct LayerNormBackward {
  int64_t rows, cols;
  Rows dy, x;
  Vector weight;
  const void *mean, *rstd;
  MutableRows dx;                 // data == nullptr: not wanted; so for the next two
  MutableVector dweight, dbias;
  void* workspace;
};

namespace LIGER_BACKEND {
void layer_norm_forward(const LayerNormForward&, Stream);
int64_t layer_norm_backward_workspace(const LayerNormBackward&, Stream);
void layer_norm_backward(const LayerNormBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
