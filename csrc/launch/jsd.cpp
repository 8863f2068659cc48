#include "launch/jsd.h"

#include "launch/cross_entropy.h"
#include "launch/elementwise.h"
#include "launch/op_plans.h"

namespace liger::launch {

Launch jsd_forward(const DeviceProfile& device, int64_t rows, int64_t vocab, int element_bytes, int vec, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "jsd";
  const Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, vec, rows, vocab});
  const LaunchPlan plan = plan_logits(device, rows, vocab, element_bytes, vec, reduction_bytes(1), false, knobs);
  check_threads(device, plan);
  return {&jsd_forward_kernel, jsd_forward_kernel.instance(vec), rows, vocab, plan, tunable};
}

Launch jsd_backward(const DeviceProfile& device, int64_t rows, int64_t vocab, int vec, const Knobs* passed_knobs) {
  return row_tiles(device, jsd_backward_kernel, {rows, vocab, vec, jsd_tile_k, true}, "jsd_backward", passed_knobs);
}

// The ops that planned_ops() lists (op_plans.h).
namespace {

// The kernels do not require whole vectors or an aligned start of a row.
int access_elements(const Call& call) { return call.aligned ? wide_vec(call) : 1; }

Launches divergence(const DeviceProfile& device, const Call& call) {
  Launches launches;
  if (!empty(call)) launches.push_back(jsd_forward(device, call.rows, call.cols, call.element_bytes, access_elements(call), &call.knobs));
  launches.push_back(sum_losses(device, call.rows));
  return launches;
}

Launches gradient(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {jsd_backward(device, call.rows, call.cols, access_elements(call), &call.knobs)};
}

const Planned forward{"jsd", divergence, {&jsd_forward_kernel, &sum_losses_kernel}};
const Planned backward{"jsd_backward", gradient, {&jsd_backward_kernel}};

}  // namespace
}  // namespace liger::launch
