#include "kernels/relu_squared.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::relu_squared_forward) relu_squared_forward;
decltype(cpu::relu_squared_backward) relu_squared_backward;
}  // namespace liger::gpu

namespace liger::cpu {

void relu_squared_forward(const ReluSquaredForward& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols), out("y", a.y, a.rows, a.cols)};
  gpu::relu_squared_forward(a, stream);
}
void relu_squared_backward(const ReluSquaredBackward& a, Stream stream) {
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols), in("x", a.x, a.rows, a.cols), out("dx", a.dx, a.rows, a.cols)};
  gpu::relu_squared_backward(a, stream);
}

}  // namespace liger::cpu
