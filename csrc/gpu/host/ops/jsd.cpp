#include "kernels/jsd.h"

#include "gpu/host/buffers.h"
#include "kernels/cross_entropy.h"

namespace liger::gpu {
decltype(cpu::jsd_forward) jsd_forward;
decltype(cpu::jsd_backward) jsd_backward;
}  // namespace liger::gpu

namespace liger::cpu {

void jsd_forward(const JsdForward& a, Stream stream) {
  const int64_t counts = a.in.labels ? 0 : CrossEntropyCounts::slots * f32;
  const Buffers buffers{in("log_q", a.in.log_q, a.in.rows, a.in.vocab), in("log_p", a.in.log_p, a.in.rows, a.in.vocab),
                        in("shift_labels", a.in.labels, a.in.rows * i64), out("losses", a.losses, a.in.rows * f32),
                        out("counts", a.counts, counts)};
  gpu::jsd_forward(a, stream);
}
void jsd_backward(const JsdBackward& a, Stream stream) {
  const Buffers buffers{in("log_q", a.in.log_q, a.in.rows, a.in.vocab),
                        in("log_p", a.in.log_p, a.in.rows, a.in.vocab),
                        in("shift_labels", a.in.labels, a.in.rows * i64),
                        in("counts", a.counts, CrossEntropyCounts::slots * f32),
                        in("grad", a.grad, 1),
                        out("dlog_q", a.dlog_q, a.in.rows, a.in.vocab)};
  gpu::jsd_backward(a, stream);
}

}  // namespace liger::cpu
