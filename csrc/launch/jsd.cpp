#include "launch/jsd.h"

#include "kernels/aligned.h"
#include "kernels/errors.h"
#include "launch/elementwise.h"

namespace liger::launch {
namespace {

// Returns the elements per access: 16 bytes of them if the rows of all tensors have the same offset modulo 16 bytes, else 1.
int access_elements(const JsdRows& in, std::initializer_list<Rows> others) {
  require(in.vocab <= int64_t{1} << 30, "jsd: log_q has ", in.vocab, " columns, vocab_size, more than the GPU kernels address (2^30)");
  for (const Rows& other : others)
    if (!equally_aligned(in.log_q, other)) return 1;
  return 16 / int(dtype_bytes(in.log_q.dtype));
}

}  // namespace

Launch op_launch(const DeviceProfile& device, const JsdForward& op, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "jsd";
  const auto [rows, vocab] = std::pair(op.in.rows, op.in.vocab);
  const int vec = access_elements(op.in, {op.in.log_p});
  const Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, vec, rows, vocab});
  const LaunchPlan plan = plan_logits(device, rows, vocab, int(dtype_bytes(op.in.log_q.dtype)), vec, reduction_bytes(1), false, knobs);
  check_threads(device, plan);
  return {&jsd_forward_kernel, jsd_forward_kernel.instance(vec), rows, vocab, plan, tunable};
}

Launch op_launch(const DeviceProfile& device, const JsdBackward& op, const Knobs* knobs) {
  const int vec = access_elements(op.in, {op.in.log_p, {op.dlog_q.data, op.dlog_q.stride, op.dlog_q.dtype}});
  return row_tiles(device, jsd_backward_kernel, {op.in.rows, op.in.vocab, vec, jsd_tile_k, true}, "jsd_backward", knobs);
}

}  // namespace liger::launch
