// GroupNorm: y = (x - mean) * rstd * weight[channel] + bias[channel], with mean and variance of the group; arXiv:1803.08494.
//
// x is [batch, groups, channels of a group, elements of a channel], contiguous. A row is one group of one sample.
#pragma once
#include "kernels/types.h"

namespace liger {

struct GroupNormShape {
  int64_t batch, groups, channels, channel;  // channels: number per group; channel: its number of elements
  constexpr int64_t rows() const { return batch * groups; }
  constexpr int64_t cols() const { return channels * channel; }
  constexpr int64_t all_channels() const { return groups * channels; }
};

struct GroupNormForward {
  GroupNormShape shape;
  Rows x;
  Vector weight, bias;  // [all channels]; either may be absent
  MutableRows y;
  void *mean, *rstd;    // [rows] in accumulator(x.dtype)
  double eps;
  void* workspace;
};

// With n = (x - mean) * rstd and g = dy * weight[channel]:
//   dx = rstd * (g - mean(g) - n * mean(g * n)),  dweight[channel] = sum of dy * n,  dbias[channel] = sum of dy, over all samples.
struct GroupNormBackward {
  GroupNormShape shape;
  Rows dy, x;
  Vector weight;
  const void *mean, *rstd;
  MutableRows dx;                // dx, dweight and dbias have data == nullptr if they are not requested
  MutableVector dweight, dbias;
  void* workspace;
};

namespace LIGER_BACKEND {
// The *_workspace functions return bytes. Their arguments are complete except for `workspace`.
int64_t group_norm_forward_workspace(const GroupNormForward&, Stream);
void group_norm_forward(const GroupNormForward&, Stream);
int64_t group_norm_backward_workspace(const GroupNormBackward&, Stream);
void group_norm_backward(const GroupNormBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
