// LayerNorm: the kernels are those of norm_forward.h and norm_backward.h, with a mean and a bias.
#include "kernels/layer_norm.h"

#include "gpu/norm_backward_launch.h"
#include "gpu/norm_forward.h"

namespace liger::gpu {

void layer_norm_forward(const LayerNormForward& a, Stream stream) {
  norm_forward<true>({.rows = a.rows,
                      .cols = a.cols,
                      .x = a.x,
                      .y = a.y,
                      .weight = a.weight,
                      .bias = a.bias,
                      .mean = static_cast<float*>(a.mean),
                      .rstd = static_cast<float*>(a.rstd),
                      .eps = float(a.eps)},
                     stream);
}

int64_t layer_norm_backward_workspace(const LayerNormBackward& a, Stream stream) {
  return norm_backward_workspace(a.rows, a.cols, true, a.dweight.data || a.dbias.data, stream);
}

void layer_norm_backward(const LayerNormBackward& a, Stream stream) {
  norm_backward<true>({.rows = a.rows,
                       .cols = a.cols,
                       .dy = a.dy,
                       .z = a.x,
                       .weight = a.weight,
                       .mean = static_cast<const float*>(a.mean),
                       .rstd = static_cast<const float*>(a.rstd),
                       .dz = a.dx,
                       .dweight = a.dweight,
                       .dbias = a.dbias},
                      a.workspace, stream);
}

}  // namespace liger::gpu
