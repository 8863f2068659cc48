#include "launch/relu_squared.h"

#include "launch/op_plans.h"

namespace liger::launch {

Launch relu_squared(const DeviceProfile& device, const Kernel& kernel, int64_t rows, int64_t cols, int vec, bool contiguous,
                    const Knobs* given) {
  const Tunable tunable = &kernel == &relu_squared_forward ? Tunable::relu_squared : Tunable::relu_squared_backward;
  const Knobs knobs = chosen_knobs(given, device, {tunable, vec, rows, cols});
  if (contiguous) {
    cols *= rows;
    rows = 1;
  }
  const LaunchPlan plan = plan_row_tiles(device, rows, cols, vec, relu_squared_k, 1, knobs);
  check_threads(device, plan);
  return {&kernel, kernel.instance(vec), rows, cols, plan, tunable};
}

// For op_plans.h.
namespace {

template <const Kernel& Of> Launches planned(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {relu_squared(device, Of, call.rows, call.cols, row_vec(call), call.contiguous, &call.knobs)};
}

const Planned forward{"relu_squared", planned<relu_squared_forward>, {&relu_squared_forward}};
const Planned backward{"relu_squared_backward", planned<relu_squared_backward>, {&relu_squared_backward}};

}  // namespace
}  // namespace liger::launch
