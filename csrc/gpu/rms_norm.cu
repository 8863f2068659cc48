// RMSNorm and add+RMSNorm: the kernels are those of norm_forward.h and norm_backward.h, without a mean.
#include "kernels/rms_norm.h"

#include "gpu/norm_backward_launch.h"
#include "gpu/norm_forward.h"

namespace liger::gpu {

void rms_norm_forward(const RmsNormForward& a, Stream stream) {
  norm_forward<false>({.rows = a.rows,
                       .cols = a.cols,
                       .x = a.x,
                       .residual = a.residual,
                       .sum = a.sum,
                       .y = a.y,
                       .weight = a.weight,
                       .rstd = static_cast<float*>(a.rstd),
                       .eps = float(a.eps),
                       .offset = float(a.offset),
                       .round_normalized = a.round_normalized},
                      stream);
}

int64_t rms_norm_backward_workspace(const RmsNormBackward& a, Stream stream) {
  return norm_backward_workspace(a.rows, a.cols, false, a.dweight.data != nullptr, stream);
}

void rms_norm_backward(const RmsNormBackward& a, Stream stream) {
  norm_backward<false>({.rows = a.rows,
                        .cols = a.cols,
                        .dy = a.dy,
                        .dsum = a.dsum,
                        .z = a.z,
                        .weight = a.weight,
                        .rstd = static_cast<const float*>(a.rstd),
                        .dz = a.dz,
                        .dweight = a.dweight,
                        .offset = float(a.offset)},
                       a.workspace, stream);
}

}  // namespace liger::gpu
