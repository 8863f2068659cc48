#include "launch/group_norm.h"

#include <optional>

#include "kernels/aligned.h"
#include "launch/elementwise.h"

namespace liger::launch {
namespace {

struct GroupNormRows {
  int64_t rows, cols, groups, channel;
  explicit GroupNormRows(const GroupNormShape& shape)
      : rows(shape.rows()), cols(shape.cols()), groups(shape.groups), channel(shape.channel) {}
};

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
// Lets a kernel start while the one before it still runs: it loads its first values before it waits for that kernel's sums.
Launch after(const DeviceProfile& device, Launch second) {
  second.plan.pdl = device.bulk_copies;
  return second;
}

// How a kernel holds rows that registers alone do not hold.
struct Holding {
  const Kernel& kernel;
  int inputs;      // tensors whose vectors it holds: x; or dy and x
  int parameters;  // whose values for each channel are in shared memory: weight and bias; or the weight
  int pair_bytes;  // bytes of shared memory for each vector: two sums
};

// The plan of a row of `holding.kernel` that `cluster` blocks of `block` threads share. Returns nothing if shared memory has too little
// room for it. A multiprocessor's shared memory is divided among the blocks that its registers have room for: 1,024 threads.
std::optional<LaunchPlan> shared_by(const DeviceProfile& device, const GroupNormRows& shape, int vec, const Holding& holding, int cluster,
                                    int block, int k) {
  if (block > device.max_block_threads || (cluster > 1 && persistent_clusters(device, cluster, 1) == 0)) return std::nullopt;
  const int64_t vectors = ceil_div(ceil_div(shape.cols / vec, cluster), block);  // of a thread
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.vec = vec;
  plan.k = k;
  plan.block = block;
  plan.cluster = cluster;
  plan.threads_per_row = cluster * block;
  const int64_t slots = std::max<int64_t>(0, vectors - plan.k), most = shared_room(device, std::clamp(1024 / block, 1, 4));
  const int64_t pairs = round_up(vectors, plan.k) * holding.pair_bytes * block;
  const int64_t table = channel_table_bytes(1, shape.cols / shape.channel, holding.parameters);
  const int64_t offset = round_up(reduction_bytes(2, cluster) + table + pairs, 16);
  if (offset + slots * block * holding.inputs * 16 > most) return std::nullopt;
  plan.slots = static_cast<int>(slots);
  plan.shared_offset = static_cast<int>(offset);
  plan.smem = static_cast<int>(offset + slots * block * holding.inputs * 16);
  plan.grid = checked_grid(shape.rows * cluster);
  return plan;
}

// The shared memory of the kernel for rows in registers, which has up to group_norm_k vectors per thread.
int64_t registers_bytes(const LaunchPlan& plan, const GroupNormRows& shape, const Holding& holding) {
  const int64_t table = channel_table_bytes(plan.block / plan.threads_per_row, shape.cols / shape.channel, holding.parameters);
  return reduction_bytes(2) + table + int64_t{plan.block} * plan.k * holding.pair_bytes;
}

// The plan of a row that a block, or a cluster of blocks, holds in registers or in registers and shared memory. A cluster shares a row that
// a block cannot hold, and few long rows, which would leave multiprocessors idle.
LaunchPlan plan_held(const DeviceProfile& device, const GroupNormRows& shape, int vec, const Holding& holding, const Knobs& knobs) {
  constexpr int64_t long_row = 2048;  // vectors
  const bool few = shape.rows <= device.multiprocessors;
  const RowTiling tiling{.vec = vec, .max_k = group_norm_k, .max_block = few || vec == 1 ? 1024 : 256, .k = few ? 1 : group_norm_k};
  LaunchPlan plan = plan_row(device, shape.rows, shape.cols, tiling, knobs);
  plan.k = vec == 1 ? group_norm_k : std::max(2, plan.k);
  if (registers_bytes(plan, shape, holding) > device.shared_per_block_optin) plan.path = Path::two_pass;
  const int64_t for_each = ceil_div(device.multiprocessors, std::max<int64_t>(1, shape.rows));
  const bool spread = for_each >= 2 && shape.cols / vec >= long_row;
  const auto hold = [&](int cluster, int threads) -> std::optional<LaunchPlan> {
    for (const Instance& instance : holding.kernel.instances)
      if (instance.vec == vec)
        if (const auto held = shared_by(device, shape, vec, holding, cluster, threads, instance.k)) return held;
    return std::nullopt;
  };
  // A knob for fewer threads than hold the row in registers.
  if (vec > 1 && !spread && knobs.threads > 0 && next_pow2(knobs.threads) * group_norm_k < shape.cols / vec)
    if (const auto held = hold(1, int(with_knob_pow2(256, knobs.threads, 64, 1024)))) return *held;
  if (vec == 1 || (plan.path == Path::regs && !spread)) return plan;
  const int preferred = spread ? int(std::clamp<int64_t>(next_pow2(for_each + 1) / 2, 2, 8)) : 1;
  // Four blocks of 256 threads on a multiprocessor overlap better than fewer large ones, also if a cluster of them then shares a row. Rows
  // of a call that cannot fill the device have nothing to overlap with: larger blocks are then better than larger clusters.
  const int block = static_cast<int>(with_knob_pow2(spread ? 512 : 256, knobs.block, 256, 1024));
  for (int outer = 1; outer <= 8; outer *= 2)
    for (int inner = 1; inner <= 8; inner *= 2) {
      const int cluster = preferred * (spread ? outer : inner), threads = block * (spread ? inner : outer);
      if (cluster > 8 || threads > 1024) continue;
      if (const auto held = hold(cluster, threads)) return *held;
    }
  return plan;
}
// Knobs do not increase the number of blocks that share a row, because the workspace for sums of channels depends on it.
LaunchPlan held(const DeviceProfile& device, const GroupNormRows& shape, int vec, const Holding& holding, const Knobs& knobs) {
  const LaunchPlan without_knobs = plan_held(device, shape, vec, holding, {});
  if (knobs == Knobs{} || without_knobs.path == Path::two_pass) return without_knobs;
  const LaunchPlan chosen = plan_held(device, shape, vec, holding, knobs);
  return chosen.cluster > without_knobs.cluster || chosen.path == Path::two_pass ? without_knobs : chosen;
}

// The launch of a row that is held: by `registers`, or by `holding.kernel` if the plan has shared memory for its vectors.
Launch held_launch(const DeviceProfile& device, const GroupNormRows& shape, LaunchPlan plan, const Kernel& registers,
                   const Holding& holding, Tunable tunable) {
  check_threads(device, plan);
  if (plan.shared_offset > 0) return {&holding.kernel, holding.kernel.instance(plan.vec, plan.k), shape.rows, shape.cols, plan, tunable};
  plan.smem = static_cast<int>(registers_bytes(plan, shape, holding));
  return {&registers, registers.instance(plan.vec, plan.k), shape.rows, shape.cols, plan, tunable};
}

// Sets the workspace for the parts of rows that are read twice.
void set_parts(GroupNormLaunches& launches, const GroupNormRows& shape, const RowParts& parts) {
  launches.parts = parts;
  launches.part_floats = round_up(2 * shape.rows * parts.per_row, 4);
}

}  // namespace

GroupNormLaunches op_launches(const DeviceProfile& device, const GroupNormForward& op, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "group_norm";
  const GroupNormRows shape(op.shape);
  // A vector may lie in two channels, but not in three.
  const int wide_vec = 16 / int(dtype_bytes(op.x.dtype));
  const bool vectors =
      aligned(op.x, shape.cols) && aligned(op.y, shape.cols) && (shape.channel % wide_vec == 0 || shape.channel > wide_vec);
  const int vec = vectors ? wide_vec : 1;
  const Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, vec, shape.rows, shape.cols});
  const Holding holding{group_norm_held, 1, 2, 0};
  const LaunchPlan plan = held(device, shape, vec, holding, knobs);
  if (plan.path == Path::regs) return {{held_launch(device, shape, plan, group_norm_registers, holding, tunable)}};
  const RowParts parts = in_parts(shape.cols, shape.cols, part_elements(device, shape, vec), most_parts, vec);
  const int smem = reduction_bytes(1);
  GroupNormLaunches out{{over_parts(device, group_norm_moments, shape, vec, parts, smem),
                         after(device, over_parts(device, group_norm_apply, shape, vec, parts, smem))}};
  set_parts(out, shape, parts);
  return out;
}

GroupNormLaunches op_launches(const DeviceProfile& device, const GroupNormBackward& op, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "group_norm_backward";
  const GroupNormRows shape(op.shape);
  // A vector lies in one channel.
  const int wide_vec = 16 / int(dtype_bytes(op.x.dtype));
  const bool vectors =
      aligned(op.dy, shape.cols) && aligned(op.x, shape.cols) && aligned(op.dx, shape.cols) && shape.channel % wide_vec == 0;
  const int vec = vectors ? wide_vec : 1;
  const bool parameters = op.dweight.data || op.dbias.data;
  const Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, vec, shape.rows, shape.cols});
  const int64_t samples = shape.rows / shape.groups;
  const int pair_bytes = parameters ? 2 * int(sizeof(float)) : 0;  // two sums of each vector
  const Holding holding{group_norm_backward_held, 2, 1, pair_bytes};
  const LaunchPlan plan = held(device, shape, vec, holding, knobs);
  GroupNormLaunches out;
  if (plan.path == Path::regs) {
    out.push_back(held_launch(device, shape, plan, group_norm_backward_registers, holding, tunable));
    out.partial_rows = samples * group_norm_sharing(shape.cols / vec, shape.channel / vec, plan.cluster);
  } else {
    const RowParts parts = in_channels(device, shape, vec);
    Launch sums = over_parts(device, group_norm_backward_sums, shape, vec, parts, 0);
    sums.plan.smem = reduction_bytes(2) + sums.plan.block * group_norm_part_k * pair_bytes;
    out.push_back(sums);
    if (op.dx.data) out.push_back(after(device, over_parts(device, group_norm_backward_apply, shape, vec, parts, reduction_bytes(2))));
    set_parts(out, shape, parts);
    out.partial_rows = samples * parts.per_span;
  }
  const int64_t channels = op.shape.all_channels();
  if (parameters) out.push_back(sum_columns(device, out.partial_rows, op.dweight.data ? channels : 0, op.dbias.data ? channels : 0));
  return out;
}

int64_t workspace_bytes(const DeviceProfile& device, const GroupNormForward& op) {
  return op_launches(device, op).part_floats * int64_t{sizeof(float)};
}
int64_t workspace_bytes(const DeviceProfile& device, const GroupNormBackward& op) {
  const GroupNormLaunches launches = op_launches(device, op);
  const int64_t sums = op.dweight.data || op.dbias.data ? launches.partial_rows * 2 * op.shape.all_channels() : 0;
  return (launches.part_floats + sums) * int64_t{sizeof(float)};
}

}  // namespace liger::launch
