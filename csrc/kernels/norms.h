// RMSNorm and add+RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450; Centered), of each row:
//
//   y = n * (weight + offset) + bias,   n = (z - mean) * rstd,   rstd = 1 / sqrt(mean((z - mean)^2) + eps)
//
// RMSNorm: mean = 0, z = x, no bias. add+RMSNorm: the same with z = x + residual, rounded to the dtype of `sum`.
// LayerNorm: mean = mean(z), z = x, offset = 0.
#pragma once
#include "kernels/types.h"

namespace liger {

// Optional tensors are null pointers: an input that was not passed, an output that nobody requested. mean and rstd are stored in
// accumulator(y.dtype).
template <bool Centered> struct NormForward {
  int64_t rows, cols;
  Rows x;
  Rows residual;              // add+RMSNorm only, like `sum`
  MutableRows sum;            // x + residual
  Vector weight, bias;        // no weight: ones, and no offset; no bias: zeros
  MutableRows y;              // dtype of x, or of sum
  void *mean, *rstd;          // [rows]; mean: LayerNorm only
  double eps, offset;
  bool round_normalized;      // casting_mode "llama": n is rounded to y's dtype before the weight multiplies it
};

// With g = dy * (weight + offset), and means over a row's columns:
//   dz = rstd * (g - mean(g) - n * mean(g * n)) [+ dsum],   dweight = sum over rows of dy * n,   dbias = sum over rows of dy.
// RMSNorm's dz has no term mean(g).
template <bool Centered> struct NormBackward {
  int64_t rows, cols;
  Rows dy;
  Rows dsum;                      // gradient of x + residual; add+RMSNorm only
  Rows z;                         // the forward's z
  Vector weight;
  const void *mean, *rstd;
  MutableRows dz;
  MutableVector dweight, dbias;   // dbias: LayerNorm only
  void* workspace;                // norm_backward_workspace() bytes
  double offset;
};

namespace LIGER_BACKEND {
template <bool Centered> void norm_forward(const NormForward<Centered>&, Stream);
template <bool Centered> int64_t norm_backward_workspace(const NormBackward<Centered>&, Stream);  // reads sizes, dtypes, null pointers
template <bool Centered> void norm_backward(const NormBackward<Centered>&, Stream);
}  // namespace LIGER_BACKEND

using RmsNormForward = NormForward<false>;
using RmsNormBackward = NormBackward<false>;
using LayerNormForward = NormForward<true>;
using LayerNormBackward = NormBackward<true>;

}  // namespace liger
