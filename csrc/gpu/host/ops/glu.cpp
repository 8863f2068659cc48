#include "kernels/glu.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::glu_forward) glu_forward;
decltype(cpu::glu_backward) glu_backward;
}  // namespace liger::gpu

namespace liger::cpu {

void glu_forward(const GluForward& a, Stream stream) {
  const Buffers buffers{in("gate", a.gate, a.rows, a.cols), in("up", a.up, a.rows, a.cols), out("h", a.h, a.rows, a.cols)};
  gpu::glu_forward(a, stream);
}
void glu_backward(const GluBackward& a, Stream stream) {
  const Buffers buffers{in("dh", a.dh, a.rows, a.cols),        in("gate", a.gate, a.rows, a.cols), in("up", a.up, a.rows, a.cols),
                        out("dgate", a.dgate, a.rows, a.cols), out("dup", a.dup, a.rows, a.cols),  out("h", a.h, a.rows, a.cols)};
  gpu::glu_backward(a, stream);
}

}  // namespace liger::cpu
