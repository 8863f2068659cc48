#include "launch/glu.h"

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

}  // namespace liger::launch
