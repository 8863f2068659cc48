// RMSNorm and add+RMSNorm: y = (x * rstd) * (weight + offset), rstd = 1 / sqrt(mean(x^2) + eps); arXiv:1910.07467.
#pragma once
#include "kernels/types.h"

namespace liger {

struct RmsNormForward {
  int64_t rows, cols;
  Rows x;
  Rows residual;      // data == nullptr: plain RMSNorm. Else the norm is of x + residual (rounded to sum.dtype)
  MutableRows sum;    // x + residual; only with residual
  Vector weight;      // data == nullptr: ones, and no offset
  MutableRows y;      // y.dtype == x.dtype, or sum.dtype with a residual
  void* rstd;         // [rows] in accumulator(y.dtype)
  double eps, offset;
  bool round_normalized;  // casting_mode "llama": x * rstd is rounded to y.dtype before the weight multiplies it
};

// With z what was normalised, and g = dy * (weight + offset):
//   dz = rstd * (g - z * rstd^2 * mean(g * z)) [+ dsum],   dweight = sum over rows of dy * z * rstd.
struct RmsNormBackward {
  int64_t rows, cols;
  Rows dy;
  Rows dsum;          // gradient of x + residual (add+RMSNorm), or data == nullptr
  Rows z;             // what was normalised: x, or x + residual
  Vector weight;
  const void* rstd;
  MutableRows dz;          // data == nullptr: not wanted
  MutableVector dweight;   // data == nullptr: not wanted
  void* workspace;         // rms_norm_backward_workspace() bytes
  double offset;
};

namespace LIGER_BACKEND {
void rms_norm_forward(const RmsNormForward&, Stream);
int64_t rms_norm_backward_workspace(const RmsNormBackward&, Stream);  // reads sizes and dtypes only
void rms_norm_backward(const RmsNormBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
