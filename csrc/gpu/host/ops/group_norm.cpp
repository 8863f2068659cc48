#include "kernels/group_norm.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::group_norm_forward_workspace) group_norm_forward_workspace;
decltype(cpu::group_norm_forward) group_norm_forward;
decltype(cpu::group_norm_backward_workspace) group_norm_backward_workspace;
decltype(cpu::group_norm_backward) group_norm_backward;
}  // namespace liger::gpu

namespace liger::cpu {

int64_t group_norm_forward_workspace(const GroupNormForward& a, Stream stream) { return gpu::group_norm_forward_workspace(a, stream); }
void group_norm_forward(const GroupNormForward& a, Stream stream) {
  const int64_t rows = a.shape.rows(), cols = a.shape.cols(), channels = a.shape.all_channels();
  const Buffers buffers{in("x", a.x, rows, cols),
                        in("weight", a.weight, channels),
                        in("bias", a.bias, channels),
                        out("y", a.y, rows, cols),
                        out("mean", a.mean, rows, f32),
                        out("rstd", a.rstd, rows, f32),
                        workspace(a.workspace, gpu::group_norm_forward_workspace(a, stream))};
  gpu::group_norm_forward(a, stream);
}
int64_t group_norm_backward_workspace(const GroupNormBackward& a, Stream stream) { return gpu::group_norm_backward_workspace(a, stream); }
void group_norm_backward(const GroupNormBackward& a, Stream stream) {
  const int64_t rows = a.shape.rows(), cols = a.shape.cols(), channels = a.shape.all_channels();
  const Buffers buffers{in("dy", a.dy, rows, cols),
                        in("x", a.x, rows, cols),
                        in("weight", a.weight, channels),
                        in("mean", a.mean, rows, f32),
                        in("rstd", a.rstd, rows, f32),
                        out("dx", a.dx, rows, cols),
                        out("dweight", a.dweight, channels),
                        out("dbias", a.dbias, channels),
                        workspace(a.workspace, gpu::group_norm_backward_workspace(a, stream))};
  gpu::group_norm_backward(a, stream);
}

}  // namespace liger::cpu
