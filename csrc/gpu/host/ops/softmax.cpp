#include "kernels/softmax.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::softmax_forward) softmax_forward;
decltype(cpu::softmax_backward) softmax_backward;
}  // namespace liger::gpu

namespace liger::cpu {

void softmax_forward(const SoftmaxForward& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols), out("y", a.y, a.rows, a.cols)};
  gpu::softmax_forward(a, stream);
}
void softmax_backward(const SoftmaxBackward& a, Stream stream) {
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols), in("y", a.y, a.rows, a.cols), out("dx", a.dx, a.rows, a.cols)};
  gpu::softmax_backward(a, stream);
}

}  // namespace liger::cpu
