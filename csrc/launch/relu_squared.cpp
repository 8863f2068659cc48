#include "launch/relu_squared.h"

#include "launch/elementwise.h"
#include "launch/op_plans.h"

namespace liger::launch {

Launch relu_squared(const DeviceProfile& device, const Kernel& kernel, int64_t rows, int64_t cols, int vec, bool contiguous,
                    const Knobs* knobs) {
  const Tunable tunable = &kernel == &relu_squared_forward ? Tunable("relu_squared") : Tunable("relu_squared_backward");
  return row_tiles(device, kernel, {rows, cols, vec, relu_squared_k, false, contiguous}, tunable, knobs);
}

// The ops that planned_ops() lists (op_plans.h).
namespace {

template <const Kernel& KernelTable> Launches planned(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {relu_squared(device, KernelTable, call.rows, call.cols, row_vec(call), call.contiguous, &call.knobs)};
}

const Planned forward{"relu_squared", planned<relu_squared_forward>, {&relu_squared_forward}};
const Planned backward{"relu_squared_backward", planned<relu_squared_backward>, {&relu_squared_backward}};

}  // namespace
}  // namespace liger::launch
