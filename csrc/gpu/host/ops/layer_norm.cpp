#include "kernels/layer_norm.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::layer_norm_forward) layer_norm_forward;
decltype(cpu::layer_norm_backward_workspace) layer_norm_backward_workspace;
decltype(cpu::layer_norm_backward) layer_norm_backward;
}  // namespace liger::gpu

namespace liger::cpu {

void layer_norm_forward(const LayerNormForward& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols),  in("weight", a.weight, a.cols),   in("bias", a.bias, a.cols),
                        out("y", a.y, a.rows, a.cols), out("mean", a.mean, a.rows, f32), out("rstd", a.rstd, a.rows, f32)};
  gpu::layer_norm_forward(a, stream);
}
int64_t layer_norm_backward_workspace(const LayerNormBackward& a, Stream stream) { return gpu::layer_norm_backward_workspace(a, stream); }
void layer_norm_backward(const LayerNormBackward& a, Stream stream) {
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols),
                        in("x", a.x, a.rows, a.cols),
                        in("weight", a.weight, a.cols),
                        in("mean", a.mean, a.rows, f32),
                        in("rstd", a.rstd, a.rows, f32),
                        out("dx", a.dx, a.rows, a.cols),
                        out("dweight", a.dweight, a.cols),
                        out("dbias", a.dbias, a.cols),
                        workspace(a.workspace, gpu::layer_norm_backward_workspace(a, stream))};
  gpu::layer_norm_backward(a, stream);
}

}  // namespace liger::cpu
