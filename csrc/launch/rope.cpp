#include "launch/rope.h"

#include "launch/op_plans.h"

namespace liger::launch {

RopePlan plan_rope_heads(const DeviceProfile& device, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t head_dim,
                         int64_t rotary_dim, int vec, const Knobs& knobs) {
  const int64_t places = rotary_dim / 2 / vec + ceil_div((head_dim - rotary_dim) / vec, 2);
  const RopePlan plan = plan_rope(device, positions, q_heads, k_heads, places, rope_heads_in_flight, knobs);
  check_threads(device, plan.launch);
  return plan;
}

RopeLaunch rope(const DeviceProfile& device, const RopeShape& shape, int64_t done, int vec, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "rope";
  const KnobKey call{
      tunable.id, vec, shape.positions, shape.head_dim, int32_t(shape.q_heads), int32_t(shape.k_heads), int32_t(shape.rotary_dim)};
  const RopePlan plan = plan_rope_heads(device, shape.positions - done, shape.q_heads, shape.k_heads, shape.head_dim, shape.rotary_dim, vec,
                                        chosen_knobs(passed_knobs, device, call));
  const Kernel& kernel = shape.interleaved && vec > 1 ? rope_interleaved_kernel : rope_kernel;
  return {{&kernel, kernel.instance(vec), plan.positions, shape.head_dim, plan.launch, tunable}, plan.lanes, plan.q_slots, plan.k_slots};
}

// The ops that planned_ops() lists (op_plans.h).
namespace {

const Fact q_heads{"q_heads", 1}, k_heads{"k_heads", 1}, rotary_dim{"rotary_dim"},
    interleaved{"interleaved"};  // rotary_dim 0: all columns of a head

Launches rotary(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  const int64_t rotary = call[rotary_dim] ? call[rotary_dim] : call.cols;
  const int vec = call.aligned && call.cols % wide_vec(call) == 0 && rotary / 2 % wide_vec(call) == 0 ? wide_vec(call) : 1;
  Launches out;
  for (int64_t done = 0; done < call.rows; done += out.back().rows)
    out.push_back(
        rope(device, {call.rows, call[q_heads], call[k_heads], call.cols, rotary, call[interleaved] != 0}, done, vec, &call.knobs));
  return out;
}

const Planned forward{"rope", rotary, {&rope_kernel, &rope_interleaved_kernel}};
const Planned backward{"rope_backward", rotary, {&rope_kernel, &rope_interleaved_kernel}};

}  // namespace
}  // namespace liger::launch
