#include "launch/glu.h"

#include "launch/elementwise.h"
#include "launch/op_plans.h"

namespace liger::launch {

Launch glu(const DeviceProfile& device, const Kernel& kernel, bool silu, int64_t rows, int64_t cols, int vec, bool contiguous,
           const Knobs* knobs) {
  constexpr Tunable tunables[2][2] = {{"geglu_backward", "swiglu_backward"}, {"geglu", "swiglu"}};
  return row_tiles(device, kernel, {rows, cols, vec, glu_k, false, contiguous}, tunables[&kernel == &glu_forward][silu], knobs);
}

// The ops that planned_ops() lists (op_plans.h).
namespace {

template <const Kernel& KernelTable, bool Silu> Launches gated(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {glu(device, KernelTable, Silu, call.rows, call.cols, row_vec(call), call.contiguous, &call.knobs)};
}

const Planned swiglu{"swiglu", gated<glu_forward, true>, {&glu_forward}};
const Planned swiglu_backward{"swiglu_backward", gated<glu_backward, true>, {&glu_backward}};
const Planned geglu{"geglu", gated<glu_forward, false>, {&glu_forward}};
const Planned geglu_backward{"geglu_backward", gated<glu_backward, false>, {&glu_backward}};

}  // namespace
}  // namespace liger::launch
