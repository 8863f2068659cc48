// The generalised Jensen-Shannon divergence on the CPU: runs the kernels on threads. Without labels every row counts; then the forward also
// stores the counts (CrossEntropyCounts) by which the mean is computed.
#include "cpu/dispatch.h"
#include "kernels/cross_entropy.h"
#include "kernels/jsd.h"

namespace liger::cpu {

void jsd_forward(const JsdForward& a, Stream) {
  parallel_items(a, a.in.rows, a.in.vocab);
  if (a.in.labels != nullptr) return;
  const auto count_all = [&](auto* counts) {
    for (int slot = 0; slot < CrossEntropyCounts::slots; ++slot) counts[slot] = 0;
    counts[CrossEntropyCounts::valid] = counts[CrossEntropyCounts::target_weight] = a.in.rows;
    counts[CrossEntropyCounts::ce_scale] = counts[CrossEntropyCounts::z_scale] = counts[CrossEntropyCounts::scale] =
        1.0 / double(a.in.rows);
  };
  if (accumulator(a.in.log_q.dtype) == Dtype::f64) count_all(static_cast<double*>(a.counts));
  else count_all(static_cast<float*>(a.counts));
}

void jsd_backward(const JsdBackward& a, Stream) { parallel_items(a, a.in.rows, a.in.vocab, {{a.dlog_q, a.in.rows, a.in.vocab}}); }

}  // namespace liger::cpu
