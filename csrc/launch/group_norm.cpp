#include "launch/group_norm.h"

#include "launch/elementwise.h"
#include "launch/op_plans.h"

namespace liger::launch {
namespace {

// The elements that a block loads before it uses the first one: a batch.
constexpr int64_t batch(int vec) { return int64_t{independent_threads} * group_norm_part_k * vec; }
// The least number of elements of a part: one batch, or several if each multiprocessor would otherwise run many blocks one after another. A
// block's reductions take as long as a batch of loads.
int64_t part_elements(const DeviceProfile& device, const GroupNormRows& shape, int vec) {
  constexpr int64_t blocks = 8 * group_norm_part_blocks;
  return round_up(std::max<int64_t>(1, shape.rows * shape.cols / (device.multiprocessors * blocks)), batch(vec));
}
// The most parts of a row. The number is limited because every block of the second kernel adds up the sums of all parts of its row. Rows of
// many short channels may have more parts.
constexpr int64_t most_parts = 1024;

// least: the least number of elements of a part. most: the most parts of a span.
RowParts in_parts(int64_t cols, int64_t span, int64_t least, int64_t most, int vec) {
  RowParts parts;
  parts.span = span;
  parts.part = round_up(std::max(least, ceil_div(span, most)), vec);
  parts.per_span = ceil_div(span, parts.part);
  parts.part = round_up(ceil_div(span, parts.per_span), vec);  // of equal length
  parts.per_span = ceil_div(span, parts.part);
  parts.per_row = ceil_div(cols, span) * parts.per_span;
  return parts;
}
// Each part lies in one channel, or consists of several whole channels.
RowParts in_channels(const DeviceProfile& device, const GroupNormRows& shape, int vec) {
  const int64_t channels = shape.cols / shape.channel, together = batch(vec) / shape.channel;
  if (together < 2) {
    const int64_t least = part_elements(device, shape, vec);
    return in_parts(shape.cols, shape.channel, least, std::max<int64_t>(1, most_parts / channels), vec);
  }
  return in_parts(shape.cols, ceil_div(channels, ceil_div(channels, together)) * shape.channel, batch(vec), 1, vec);
}

Launch over_parts(const DeviceProfile& device, const Kernel& kernel, const GroupNormRows& shape, int vec, const RowParts& parts, int smem) {
  LaunchPlan plan = plan_block_per_row(device, shape.rows * parts.per_row, std::min(parts.part, batch(vec)), vec);
  plan.smem = smem;
  check_threads(device, plan);
  return {&kernel, kernel.instance(vec), shape.rows, shape.cols, plan};
}

// The plan of a row in the registers of a block, or of a cluster of blocks if a block cannot hold the row, or if few long rows would leave
// multiprocessors idle. Knobs do not increase the number of blocks that share a row, because the workspace for sums of channels depends on
// it.
LaunchPlan held(const DeviceProfile& device, const GroupNormRows& shape, int vec, int max_k, const Knobs& knobs) {
  constexpr int64_t long_row = 2048;  // vectors
  const RowTiling tiling{.vec = vec, .max_k = vec == 1 ? 4 : max_k, .max_block = 512, .k = 4};
  const auto plan = [&](const Knobs& with) { return plan_row_forward(device, shape.rows, shape.cols, tiling, with); };
  const auto too_large = [](const LaunchPlan& launch_plan) {
    return launch_plan.cluster == 1 && launch_plan.k > 4 && launch_plan.block > group_norm_k_threads;
  };
  LaunchPlan without_knobs = plan({});
  const int64_t for_each = device.multiprocessors / std::max<int64_t>(1, shape.rows);
  if (without_knobs.path == Path::regs &&
      (too_large(without_knobs) || (for_each >= 2 && without_knobs.cluster == 1 && shape.cols / vec >= long_row))) {
    without_knobs = plan({.cluster = int(std::clamp<int64_t>(next_pow2(for_each + 1) / 2, 2, 8))});
    if (too_large(without_knobs)) without_knobs.path = Path::reread;
  }
  if (knobs == Knobs{} || without_knobs.path == Path::reread) return without_knobs;
  const LaunchPlan chosen = plan(knobs);
  return chosen.cluster > without_knobs.cluster || too_large(chosen) ? without_knobs : chosen;
}

}  // namespace

GroupNormLaunches group_norm(const DeviceProfile& device, const GroupNormRows& shape, int vec, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "group_norm";
  const Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, vec, shape.rows, shape.cols});
  LaunchPlan plan = held(device, shape, vec, group_norm_k, knobs);
  if (plan.path == Path::reread) {
    const RowParts parts = in_parts(shape.cols, shape.cols, part_elements(device, shape, vec), most_parts, vec);
    const int smem = reduction_bytes(1);
    return {over_parts(device, group_norm_moments, shape, vec, parts, smem), over_parts(device, group_norm_apply, shape, vec, parts, smem),
            parts};
  }
  plan.k = vec == 1 ? 4 : std::max(2, plan.k);
  plan.smem = reduction_bytes(2, plan.cluster);
  check_threads(device, plan);
  return {{&group_norm_registers, group_norm_registers.instance(vec, plan.k), shape.rows, shape.cols, plan, tunable}};
}

GroupNormLaunches group_norm_backward(const DeviceProfile& device, const GroupNormRows& shape, int vec, bool parameters,
                                      const Knobs* passed_knobs) {
  constexpr Tunable tunable = "group_norm_backward";
  const Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, vec, shape.rows, shape.cols});
  LaunchPlan plan = held(device, shape, vec, group_norm_backward_k, knobs);
  const int64_t samples = shape.rows / shape.groups;
  const auto bytes = [&](const LaunchPlan& launch_plan, int k) {  // shared memory for reductions, and for two sums of each vector
    return reduction_bytes(2, launch_plan.cluster) + (parameters ? launch_plan.block * k * 2 * int(sizeof(float)) : 0);
  };
  if (plan.path == Path::reread) {
    const RowParts parts = in_channels(device, shape, vec);
    Launch sums = over_parts(device, group_norm_backward_sums, shape, vec, parts, 0);
    sums.plan.smem = bytes(sums.plan, group_norm_part_k);
    return {sums, over_parts(device, group_norm_backward_apply, shape, vec, parts, reduction_bytes(2)), parts, samples * parts.per_span};
  }
  plan.k = vec == 1 ? 4 : std::max(2, plan.k);
  plan.smem = bytes(plan, plan.k);
  check_threads(device, plan);
  const Instance& instance = group_norm_backward_registers.instance(vec, plan.k);
  return {{&group_norm_backward_registers, instance, shape.rows, shape.cols, plan, tunable}, {}, {}, samples * plan.cluster};
}

// The ops that planned_ops() lists (op_plans.h).
namespace {

const Fact groups{"groups", 1}, channel{"channel"};  // groups of a sample; elements of a channel, 0: the whole group is one channel

GroupNormRows group_rows(const Call& call) { return {call.rows, call.cols, call[groups], call[channel] > 0 ? call[channel] : call.cols}; }

Launches forward(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  const GroupNormRows shape = group_rows(call);
  const int vec = row_vec(call);
  const GroupNormLaunches config = group_norm(device, shape, shape.channel % vec == 0 || shape.channel > vec ? vec : 1, &call.knobs);
  return config.apply.kernel ? Launches{config.main, config.apply} : Launches{config.main};
}

Launches backward(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  const GroupNormRows shape = group_rows(call);
  const int vec = row_vec(call);
  const GroupNormLaunches config = group_norm_backward(device, shape, shape.channel % vec == 0 ? vec : 1, !call[frozen], &call.knobs);
  Launches out{config.main};
  if (config.apply.kernel) out.push_back(config.apply);
  const int64_t channels = shape.groups * (shape.cols / shape.channel);
  if (!call[frozen]) out.push_back(sum_columns(device, config.partial_rows, channels, call[bias] ? channels : 0));
  return out;
}

const Planned planned_forward{"group_norm", forward, {&group_norm_registers, &group_norm_moments, &group_norm_apply}};
const Planned planned_backward{
    "group_norm_backward",
    backward,
    {&group_norm_backward_registers, &group_norm_backward_sums, &group_norm_backward_apply, &sum_columns_kernel}};

}  // namespace
}  // namespace liger::launch
