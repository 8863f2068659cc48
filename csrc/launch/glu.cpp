#include "launch/glu.h"
#include "launch/op_plans.h"

namespace liger::launch {

Launch glu(const DeviceProfile& device, const Kernel& kernel, Tunable tunable, int64_t rows, int64_t cols, int vec, bool contiguous,
           const Knobs* given) {
  const Knobs knobs = chosen_knobs(given, device, {tunable, vec, rows, cols});
  if (contiguous) {
    cols *= rows;
    rows = 1;
  }
  const LaunchPlan plan = plan_row_tiles(device, rows, cols, vec, glu_k, 1, knobs);
  check_threads(device, plan);
  return {&kernel, kernel.instance(vec), rows, cols, plan, tunable};
}

// For op_plans.h.
namespace {

Launches gated(const DeviceProfile& device, const Call& call, const Kernel& kernel, Tunable tunable) {
  if (empty(call)) return {};
  return {glu(device, kernel, tunable, call.rows, call.cols, row_vec(call), call.contiguous, &call.knobs)};
}

const Planned swiglu{"swiglu",
                     [](const DeviceProfile& device, const Call& call) { return gated(device, call, glu_forward, Tunable::swiglu); },
                     {&glu_forward}};
const Planned swiglu_backward{
    "swiglu_backward",
    [](const DeviceProfile& device, const Call& call) { return gated(device, call, glu_backward, Tunable::swiglu_backward); },
    {&glu_backward}};
const Planned geglu{"geglu",
                    [](const DeviceProfile& device, const Call& call) { return gated(device, call, glu_forward, Tunable::geglu); },
                    {&glu_forward}};
const Planned geglu_backward{
    "geglu_backward",
    [](const DeviceProfile& device, const Call& call) { return gated(device, call, glu_backward, Tunable::geglu_backward); },
    {&glu_backward}};

}  // namespace

}  // namespace liger::launch
