#include "launch/softmax.h"

#include "launch/op_plans.h"

namespace liger::launch {
namespace {

Launch softmax(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, const Kernel& held, const Kernel& reread, int wide_k,
               int cluster_from, Tunable tunable, const Knobs* given) {
  const Knobs knobs = chosen_knobs(given, device, {tunable.id, vec, rows, cols});
  LaunchPlan plan = plan_row_forward(device, rows, cols, vec, vec == 1 ? 4 : wide_k, {.cluster_from = cluster_from}, knobs);
  plan.smem = reduction_bytes(2, plan.cluster);
  check_threads(device, plan);
  if (plan.path == Path::reread) return {&reread, reread.instance(vec), rows, cols, plan, tunable};
  return {&held, held.instance(vec, vec == 1 ? 4 : plan.k), rows, cols, plan, tunable};
}

}  // namespace

Launch softmax_forward(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, const Knobs* knobs) {
  return softmax(device, rows, cols, vec, softmax_registers, softmax_reread, softmax_forward_k, two_blocks_from, "softmax", knobs);
}
Launch softmax_backward(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, const Knobs* knobs) {
  return softmax(device, rows, cols, vec, softmax_backward_registers, softmax_backward_reread, softmax_backward_k, 0, "softmax_backward",
                 knobs);
}

// For op_plans.h.
namespace {

template <auto Of> Launches over_rows(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {Of(device, call.rows, call.cols, row_vec(call), &call.knobs)};
}

const Planned forward{"softmax", over_rows<softmax_forward>, {&softmax_registers, &softmax_reread}};
const Planned backward{"softmax_backward", over_rows<softmax_backward>, {&softmax_backward_registers, &softmax_backward_reread}};

}  // namespace
}  // namespace liger::launch
