#include "kernels/jsd.h"

#include "gpu/host/buffers.h"
#include "kernels/cross_entropy.h"

namespace liger::gpu {
decltype(cpu::jsd_forward) jsd_forward;
decltype(cpu::jsd_backward) jsd_backward;
}  // namespace liger::gpu

namespace liger::cpu {

namespace {

// The log-probabilities of rows that do not count are not read.
template <class... Others> Buffers jsd_buffers(const JsdRows& a, const Others&... others) {
  const auto skipped = [a](int64_t row) { return a.labels != nullptr && a.labels[row] == a.ignore_index; };
  return {optional_rows(in("log_q", a.log_q, a.rows, a.vocab), skipped), optional_rows(in("log_p", a.log_p, a.rows, a.vocab), skipped),
          in("shift_labels", a.labels, a.rows, i64), others...};
}

}  // namespace

void jsd_forward(const JsdForward& a, Stream stream) {
  const int64_t counts = a.in.labels ? 0 : CrossEntropyCounts::slots;
  const Buffers buffers = jsd_buffers(a.in, out("losses", a.losses, a.in.rows, f32), out("counts", a.counts, counts, f32));
  gpu::jsd_forward(a, stream);
}
void jsd_backward(const JsdBackward& a, Stream stream) {
  const Buffers buffers = jsd_buffers(a.in, optional(in("counts", a.counts, CrossEntropyCounts::slots, f32)),
                                      optional(in("grad", a.grad, 1)), out("dlog_q", a.dlog_q, a.in.rows, a.in.vocab));
  gpu::jsd_backward(a, stream);
}

}  // namespace liger::cpu
