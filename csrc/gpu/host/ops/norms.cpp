#include "kernels/norms.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
template <bool Centered> void norm_forward(const NormForward<Centered>&, Stream);
template <bool Centered> int64_t norm_backward_workspace(const NormBackward<Centered>&, Stream);
template <bool Centered> void norm_backward(const NormBackward<Centered>&, Stream);
}  // namespace liger::gpu

namespace liger::cpu {

template <bool Centered> void norm_forward(const NormForward<Centered>& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols),      in("residual", a.residual, a.rows, a.cols),
                        in("weight", a.weight, a.cols),    in("bias", a.bias, a.cols),
                        out("sum", a.sum, a.rows, a.cols), out("y", a.y, a.rows, a.cols),
                        out("mean", a.mean, a.rows, f32),  out("rstd", a.rstd, a.rows, f32)};
  gpu::norm_forward(a, stream);
}

template <bool Centered> int64_t norm_backward_workspace(const NormBackward<Centered>& a, Stream stream) {
  return gpu::norm_backward_workspace(a, stream);
}

template <bool Centered> void norm_backward(const NormBackward<Centered>& a, Stream stream) {
  const auto for_dz = [&](const Buffer& buffer) { return a.dz.data ? buffer : optional(buffer); };
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols),  for_dz(in("dsum", a.dsum, a.rows, a.cols)),
                        in("z", a.z, a.rows, a.cols),    for_dz(in("weight", a.weight, a.cols)),
                        in("mean", a.mean, a.rows, f32), in("rstd", a.rstd, a.rows, f32),
                        out("dz", a.dz, a.rows, a.cols), out("dweight", a.dweight, a.cols),
                        out("dbias", a.dbias, a.cols),   workspace(a.workspace, gpu::norm_backward_workspace(a, stream))};
  gpu::norm_backward(a, stream);
}

template void norm_forward(const RmsNormForward&, Stream);
template int64_t norm_backward_workspace(const RmsNormBackward&, Stream);
template void norm_backward(const RmsNormBackward&, Stream);
template void norm_forward(const LayerNormForward&, Stream);
template int64_t norm_backward_workspace(const LayerNormBackward&, Stream);
template void norm_backward(const LayerNormBackward&, Stream);

}  // namespace liger::cpu
