#include "kernels/rms_norm.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::rms_norm_forward) rms_norm_forward;
decltype(cpu::rms_norm_backward_workspace) rms_norm_backward_workspace;
decltype(cpu::rms_norm_backward) rms_norm_backward;
}  // namespace liger::gpu

namespace liger::cpu {

void rms_norm_forward(const RmsNormForward& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols),   in("residual", a.residual, a.rows, a.cols),
                        in("weight", a.weight, a.cols), out("sum", a.sum, a.rows, a.cols),
                        out("y", a.y, a.rows, a.cols),  out("rstd", a.rstd, a.rows, f32)};
  gpu::rms_norm_forward(a, stream);
}
int64_t rms_norm_backward_workspace(const RmsNormBackward& a, Stream stream) { return gpu::rms_norm_backward_workspace(a, stream); }
void rms_norm_backward(const RmsNormBackward& a, Stream stream) {
  const Buffer dsum = in("dsum", a.dsum, a.rows, a.cols);
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols),    a.dz.data ? dsum : optional(dsum),
                        in("z", a.z, a.rows, a.cols),      in("weight", a.weight, a.cols),
                        in("rstd", a.rstd, a.rows, f32),   out("dz", a.dz, a.rows, a.cols),
                        out("dweight", a.dweight, a.cols), workspace(a.workspace, gpu::rms_norm_backward_workspace(a, stream))};
  gpu::rms_norm_backward(a, stream);
}

}  // namespace liger::cpu
