#include "launch/norms.h"

#include <algorithm>

#include "kernels/aligned.h"
#include "launch/elementwise.h"

namespace liger::launch {
namespace {

struct NormBackwardKind {
  bool centered, mixed;  // centered: LayerNorm; mixed: dy, dsum and z do not all have one dtype
  bool frozen;  // no parameter needs a gradient, and the weight has z's dtype
  int inputs;  // number of tensors that the kernel reads: dy, z and, if present, dsum
  bool dz;     // dz is requested
};

// The tiling of the forward's rows. Its constants were tuned on an H200 (docs/measurements.md).
RowTiling forward_tiling(NormForwardKind kind, int64_t cols, int vec) {
  const int max_k = norm_forward_k(vec);
  const int64_t vectors = ceil_div(cols, vec);
  // Threads take longer to merge LayerNorm's moments than RMSNorm's sum. So LayerNorm's rows have fewer threads, with up to six vectors
  // each, in blocks of 256 threads where these hold a row.
  if (kind.centered)
    return {.vec = vec, .max_k = max_k, .max_block = vectors <= 256 * max_k ? 256 : 512, .k = 4, .long_k = 6, .long_from = 64};
  // With two tensors, two vectors of each per thread are fastest, and eight are too many. So rows that 512 threads would hold with more
  // than four vectors each get 1,024 threads, if these hold them with four.
  if (kind.residual) {
    const bool large = 512 * 4 < vectors && vectors <= 1024 * 4;
    return {.vec = vec, .max_k = max_k, .max_block = large ? 1024 : 512, .k = 2};
  }
  // Five vectors are faster than two or three in twice as many threads.
  return {.vec = vec, .max_k = max_k, .max_block = 512, .k = 4, .long_k = 5, .long_from = 32};
}

// Returns whether rows get whole warps with three vectors per thread. In a power of two of threads, many threads would have one vector less
// than the others, or none. Whole warps are not faster for rows that fill at least 7/8 of a power of two of vectors (docs/measurements.md).
// Few rows get more threads instead. Shorter and longer rows, and fp32, were not measured.
bool in_whole_warps(const DeviceProfile& device, NormForwardKind kind, int64_t rows, int64_t vectors, int vec) {
  if (kind.centered || !kind.same_dtype || vec != 8 || few_rows(device, rows)) return false;
  return 256 < vectors && vectors <= forward_warps_bound * forward_warps_k && 8 * vectors < 7 * next_pow2(vectors);
}
LaunchPlan plan_whole_warps(const DeviceProfile& device, int64_t rows, int64_t vectors, int vec) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.vec = vec;
  plan.k = forward_warps_k;
  plan.block = plan.threads_per_row = static_cast<int>(round_up(ceil_div(vectors, forward_warps_k), device.warp));
  plan.grid = checked_grid(rows);
  plan.smem = row_warps_floats * int{sizeof(float)};
  return plan;
}

// The most rows of a block whose sums over rows fit into shared memory at the block's end, behind the reductions' buffers.
int64_t most_block_rows(const DeviceProfile& device, int64_t cols, bool centered) {
  const int64_t each = cols * (centered ? 2 : 1) * int64_t{sizeof(float)};
  return std::max<int64_t>(1, (device.shared_per_block_optin - std::max<int>(row_warps_floats * sizeof(float), reduction_bytes(2))) / each);
}

// The number of resident blocks of the persistent backward per multiprocessor.
int64_t resident_blocks(const LaunchPlan& plan, const Knobs& knobs) { return with_knob(plan.block <= 256 ? 2 : 1, knobs.resident, 1, 4); }

// The plan of rows of whole warps. Several rows share a block of up to 512 threads, or of 256 on devices without bulk copies.
LaunchPlan norm_warps(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, bool centered, const Knobs& knobs) {
  const int64_t vectors = ceil_div(cols, vec);
  // Two vectors per thread; three where a block then holds two rows in place of one. Three vectors are faster for LayerNorm of 5,120 and
  // 6,144 columns and for RMSNorm of 6,144, but slower for RMSNorm of 5,120 (docs/measurements.md).
  const bool three = device.bulk_copies && 2 * device.warp * (centered ? 8 : 10) < vectors && vectors <= 3 * 256;
  const int64_t warps = ceil_div(vectors, (three ? 3 : 2) * device.warp), most_warps = std::min<int64_t>(2 * warps, 512 / device.warp);
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.vec = vec;
  plan.threads_per_row = static_cast<int>(with_knob(warps, ceil_div(knobs.threads, device.warp), warps, most_warps) * device.warp);
  plan.k = vectors > 2 * plan.threads_per_row ? 3 : 2;
  // Two blocks of up to 256 threads in place of one of 512, if they hold as many rows and a row has fewer than 256 threads. That is faster;
  // for 256 threads per row it is equal, and slower with three vectors per thread (docs/measurements.md).
  const bool pairs = plan.threads_per_row < 256 && 512 / plan.threads_per_row == 2 * (256 / plan.threads_per_row);
  // A block has at most 15 barriers for its rows. A call of few rows is spread over all multiprocessors, with fewer rows per block.
  const int64_t most =
      std::min<int64_t>({15, most_block_rows(device, cols, centered), 512 / plan.threads_per_row, std::max<int64_t>(1, rows)});
  const int64_t threads = device.bulk_copies && !pairs ? 512 : 256;
  const int64_t preferred = std::clamp<int64_t>(std::min(threads / plan.threads_per_row, ceil_div(rows, device.multiprocessors)), 1, most);
  const int64_t groups = with_knob(preferred, ceil_div(knobs.block, plan.threads_per_row), 1, most);
  plan.block = static_cast<int>(groups * plan.threads_per_row);
  plan.grid = checked_grid(ceil_div(rows, groups));
  return plan;
}

Tunable backward_tunable(NormBackwardKind kind) {
  if (kind.centered) return "layer_norm_backward";
  return kind.inputs > 2 ? Tunable("add_rms_norm_backward") : Tunable("rms_norm_backward");
}

// The number of rows that a block, or cluster, processes one after another.
int64_t plan_rounds(const LaunchPlan& plan, int64_t rows) {
  return ceil_div(rows, int64_t{plan.grid} / plan.cluster * std::max(1, plan.block / plan.threads_per_row));
}

// The template argument `threads` (norms.h) of the instance that a plan needs.
int known_threads(const DeviceProfile& device, const LaunchPlan& plan, NormBackwardKind kind, int64_t rows) {
  if (plan.vec == 1 || plan.threads_per_row < plan.warp) return 0;
  if (plan.cluster == 1 && plan.threads_per_row != 512) return whole_warps;
  // Overlapped rows hide the exchange between the blocks of a cluster, but take more instructions. They are slower where a block holds a
  // row, unless there are three tensors, and in many rounds of clusters of two blocks (docs/measurements.md).
  const bool long_exchange = plan.cluster > 2 || (plan.cluster == 2 && plan_rounds(plan, rows) <= 16);
  const bool overlap = device.bulk_copies && plan.k == 2 && (kind.inputs > 2 || long_exchange);
  return overlap ? overlapped_rows : 512;
}

// The number of pipeline stages, each of which holds one row, for the warps of a row. `rounds`: how many rows pass through them.
int ring_stages(const DeviceProfile& device, const LaunchPlan& plan, NormBackwardKind kind, bool overlapped, int64_t rounds, int most_bytes,
                int stage_bytes) {
  if (!device.bulk_copies) {
    // A row that is read twice occupies its stage until dz is stored. Until then only a second stage has copies in flight. Three stages are
    // slower than two (docs/measurements.md).
    if (norm_backward_reads_twice(kind.centered, plan.vec, plan.k)) return 2;
    return std::clamp<int>(ceil_div(rounds, 8), 1, std::clamp(most_bytes / stage_bytes, 1, async_stages));
  }
  // With one stage the kernel requests the next row before the reduction, with several after it (norm_backward.h). One stage is faster for
  // few rounds of RMSNorm, since the first and the last row arrive sooner, and for three tensors, since one row of each is enough bytes in
  // flight.
  if (kind.inputs > 2 || (!kind.centered && rounds <= 16)) return 1;
  // Overlapped rows hold a row in registers, too: a second stage is slower, or faster by less than 3 % (docs/measurements.md).
  if (overlapped) return 1;
  // Three stages are faster only for many rounds of RMSNorm (docs/measurements.md).
  return kind.centered || rounds <= 32 ? 2 : 3;
}

// Sets the plan's shared memory: `fixed` bytes and, behind them, the pipeline stages, if the kernel uses bulk or asynchronous copies.
// `resident`: blocks per multiprocessor at a time. `stages`: the knob for the number of stages, limited by the memory; 0: ring_stages
// chooses.
void add_ring(const DeviceProfile& device, LaunchPlan& plan, NormBackwardKind kind, bool overlapped, int64_t rows, int fixed,
              int64_t resident, int stages) {
  plan.smem = fixed;
  if (plan.vec == 1 || !(device.bulk_copies || (device.async_copies && (!kind.centered || plan.k == 4)))) return;
  plan.shared_offset = static_cast<int>(round_up(fixed, 128));
  const int stage = ring_row_bytes(device, plan, kind.inputs);
  const int room = shared_room(device, resident) - plan.shared_offset;
  const int most = std::max(1, device.bulk_copies ? room / stage : std::min(room / stage, async_stages));
  const int preferred = std::min(ring_stages(device, plan, kind, overlapped, plan_rounds(plan, rows), 96 * 1024 / resident, stage), most);
  plan.stages = static_cast<int>(with_knob(preferred, stages, 1, most));
  plan.smem = plan.shared_offset + plan.stages * stage;
}

// Returns the launches without the last one, SumColumns.
Launches backward(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, NormBackwardKind kind, const Knobs& knobs) {
  const auto launch = [&](const Kernel& kernel, const Instance& instance, const LaunchPlan& plan, Tunable tunable = {}) {
    return Launch{&kernel, instance, rows, cols, plan, tunable};
  };
  if (kind.frozen && !kind.mixed && vec > 1) {
    const bool few = few_rows(device, rows);
    const int bound = norm_backward_rows.instance(vec, 2).max_threads, most = !few && ceil_div(cols, vec) <= 256 * 4 ? 256 : bound;
    LaunchPlan plan =
        plan_row(device, rows, cols, {.vec = vec, .max_block = most, .k = few ? 1 : 2, .long_k = few ? 0 : 3, .long_from = 32});
    if (plan.path == Path::regs) {
      plan.k = std::max(2, plan.k);
      plan.smem = reduction_bytes(kind.centered ? 2 : 1);
      check_threads(device, plan);
      return {launch(norm_backward_rows, norm_backward_rows.instance(vec, plan.k), plan)};
    }
  }
  if (rows <= 4 * device.multiprocessors && !kind.mixed && vec > 1 && knobs == Knobs{}) {
    LaunchPlan plan = plan_row(device, rows, cols, {.vec = vec, .max_block = 512, .min_block = 256});
    if (plan.path == Path::regs) {
      plan.k = std::max(2, plan.k);
      // Wide tiles are faster only where there would be more narrow tiles than multiprocessors (docs/measurements.md).
      const Instance& narrow = norm_backward_few.instance(vec, plan.k, 4);
      const bool wide_tiles = plan.k == 2 && few_tiles(cols, narrow) > device.multiprocessors;
      const Instance& chosen = wide_tiles ? norm_backward_few.instance(vec, plan.k, 8) : narrow;
      plan.smem =
          std::max(reduction_bytes(2), plan.block / device.warp * chosen.row_layout * vec * (kind.centered ? 2 : 1) * int(sizeof(float)));
      plan.grid += few_tiles(cols, chosen);
      check_threads(device, plan);
      return {launch(norm_backward_few, chosen, plan, backward_tunable(kind))};
    }
  }
  LaunchPlan plan = plan_norm_backward(device, rows, cols, vec, kind.centered, knobs);
  if (plan.path == Path::regs && !kind.mixed) {
    const int groups = std::max(1, plan.block / plan.threads_per_row), threads = known_threads(device, plan, kind, rows);
    const int reduction = threads == whole_warps ? row_warps_floats * int(sizeof(float)) : reduction_bytes(2, plan.cluster);
    add_ring(device, plan, kind, threads == overlapped_rows, rows, reduction, resident_blocks(plan, knobs), knobs.stages);
    // Rows that share a block add up their sums in shared memory at the end, in place of the pipeline stages.
    if (groups > 1) plan.smem = std::max(plan.smem, reduction + groups * (kind.centered ? 2 : 1) * int(cols) * int(sizeof(float)));
    if (knobs != Knobs{}) {
      plan.partial_rows = static_cast<int>(std::min<int64_t>(plan.partial_rows, norm_partial_rows(device, rows, cols, kind.centered)));
      plan.grid = plan.partial_rows * plan.cluster;
    }
    return {launch(norm_backward_registers, norm_backward_registers.instance(vec, plan.k, threads), plan, backward_tunable(kind))};
  }
  const LaunchPlan tiles = plan_row_ranges(device, rows, cols, vec);
  LaunchPlan means = plan_block_per_row(device, rows, cols, vec);
  means.smem = reduction_bytes(2);
  check_threads(device, tiles);
  check_threads(device, means);
  Launches out;
  if (kind.dz) out.push_back(launch(norm_backward_means, norm_backward_means.instance(vec), means));
  out.push_back(launch(norm_backward_tiles, norm_backward_tiles.instance(vec), tiles));
  return out;
}

Launch forward(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, NormForwardKind kind, const Knobs* passed_knobs) {
  const Tunable tunable = kind.centered ? Tunable("layer_norm") : kind.residual ? Tunable("add_rms_norm") : Tunable("rms_norm");
  const Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, vec, rows, cols});
  if (!knobs.spread_rows() && in_whole_warps(device, kind, rows, ceil_div(cols, vec), vec)) {
    const LaunchPlan plan = plan_whole_warps(device, rows, ceil_div(cols, vec), vec);
    check_threads(device, plan);
    return {&norm_forward_registers, norm_forward_registers.instance(vec, plan.k, whole_warps), rows, cols, plan, tunable};
  }
  LaunchPlan plan = plan_row_forward(device, rows, cols, forward_tiling(kind, cols, vec), knobs);
  plan.smem = reduction_bytes(kind.centered ? 2 : 1, plan.cluster);
  check_threads(device, plan);
  if (plan.path == Path::two_pass) return {&norm_forward_two_pass, norm_forward_two_pass.instance(vec), rows, cols, plan, tunable};
  // Eight threads per row as a compile-time constant are faster than as a run-time number (docs/measurements.md).
  const Instance lanes{forward_lanes_bound, vec, forward_lanes_k, forward_lanes};
  const bool in_lanes = vec == 8 && norm_forward_has(kind, lanes) && plan.threads_per_row == forward_lanes && plan.k == forward_lanes_k &&
                        plan.block <= forward_lanes_bound;
  const int k = vec == 1 ? 4 : plan.k;
  const int threads = in_lanes ? forward_lanes : plan.cluster > 1 ? cluster_block : row_threads;
  return {&norm_forward_registers, norm_forward_registers.instance(vec, k, threads), rows, cols, plan, tunable};
}

// Returns `vec` if whole vectors fit the rows, otherwise 1.
int row_vec(bool are_aligned, int64_t cols, int vec) { return are_aligned && cols % vec == 0 ? vec : 1; }

}  // namespace

template <bool Centered> NormForwardKind norm_forward_kind(const NormForward<Centered>& op, int vec) {
  const auto has_dtype = [&](const Vector& parameter) { return parameter.data && parameter.dtype == op.y.dtype; };
  const bool same_dtype = vec > 1 && has_dtype(op.weight) && (!Centered || has_dtype(op.bias));
  return {.centered = Centered, .residual = op.residual.data != nullptr, .same_dtype = same_dtype};
}

template <bool Centered> Launches op_launches(const DeviceProfile& device, const NormForward<Centered>& op, const Knobs* knobs) {
  if (op.rows == 0 || op.cols == 0) return {};
  const bool are_aligned = aligned(op.x, op.cols) && aligned(op.residual, op.cols) && aligned(op.sum, op.cols) && aligned(op.y, op.cols) &&
                           aligned(op.weight, op.cols) && aligned(op.bias, op.cols);
  const int vec = row_vec(are_aligned, op.cols, 16 / int(dtype_bytes(op.y.dtype)));
  return {forward(device, op.rows, op.cols, vec, norm_forward_kind(op, vec), knobs)};
}

LaunchPlan plan_norm_backward(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, bool centered, const Knobs& knobs) {
  const int64_t vectors = ceil_div(cols, vec);
  const int k = vec == 1 ? 4 : 2;
  LaunchPlan plan;
  if (vec > 1 && device.warp < vectors && vectors <= 2 * 512) {
    plan = norm_warps(device, rows, cols, vec, centered, knobs);
  } else {
    // Rows of a part of a warp, of single elements, of a cluster, and long rows on devices without clusters.
    const int max_k = !device.bulk_copies && vectors > 512 * 2 ? 4 : k;
    const bool few = rows * 8 <= device.multiprocessors;  // few rows get more threads each
    // A row has at least `least` threads, which limits how many rows a block can have.
    const int64_t least = std::min<int64_t>(next_pow2(ceil_div(vectors, max_k)), 512), most = most_block_rows(device, cols, centered);
    const int bound = static_cast<int>(std::min<int64_t>(least * (next_pow2(most + 1) / 2), 512));
    const RowTiling tiling{.vec = vec,
                           .max_k = max_k,
                           .max_block = 512,
                           .bound = bound,
                           .min_block = device.bulk_copies && vec > 1 ? 512 : 256,
                           .k = few ? 1 : k};
    plan = plan_row(device, rows, cols, tiling, knobs);
  }
  plan = with_cluster(device, plan, rows, cols, k, 512, knobs.wanted_blocks(1));
  plan.k = std::max(plan.k, k);
  // `resident` blocks or clusters fill the device. The grid is the smallest one with the same number of rounds: it is as fast and leaves
  // fewer partial rows.
  const int64_t resident = plan.cluster > 1 ? persistent_clusters(device, plan.cluster, knobs.resident)
                                            : int64_t{device.multiprocessors} * resident_blocks(plan, knobs);
  const int64_t clusters = plan.grid / plan.cluster;
  plan.partial_rows = checked_grid(ceil_div(clusters, ceil_div(clusters, resident)));
  plan.grid = checked_grid(int64_t{plan.partial_rows} * plan.cluster);
  return plan;
}

template <bool Centered> Launches op_launches(const DeviceProfile& device, const NormBackward<Centered>& op, const Knobs* passed_knobs) {
  if (op.rows == 0 || op.cols == 0) return {};
  const bool are_aligned = aligned(op.dy, op.cols) && aligned(op.dsum, op.cols) && aligned(op.z, op.cols) && aligned(op.dz, op.cols) &&
                           aligned(op.weight, op.cols);
  const bool any_f32 = op.z.dtype == Dtype::f32 || op.dy.dtype == Dtype::f32 || (op.dsum.data && op.dsum.dtype == Dtype::f32);
  const int vec = row_vec(are_aligned, op.cols, any_f32 ? 4 : 8);
  const bool parameters = op.dweight.data || op.dbias.data;
  const NormBackwardKind kind{.centered = Centered,
                              .mixed = op.dy.dtype != op.z.dtype || (op.dsum.data && op.dsum.dtype != op.z.dtype),
                              .frozen = !parameters && op.weight.data && op.weight.dtype == op.z.dtype,
                              .inputs = op.dsum.data ? 3 : 2,
                              .dz = op.dz.data != nullptr};
  const Knobs knobs = chosen_knobs(passed_knobs, device, {backward_tunable(kind).id, vec, op.rows, op.cols});
  Launches out = backward(device, op.rows, op.cols, vec, kind, knobs);
  const int partial_rows = (out.end() - 1)->plan.partial_rows;
  if (parameters && partial_rows > 0)
    out.push_back(sum_columns(device, partial_rows, op.dweight.data ? op.cols : 0, op.dbias.data ? op.cols : 0));
  return out;
}

int64_t norm_partial_rows(const DeviceProfile& device, int64_t rows, int64_t cols, bool centered) {
  int64_t most = 1;
  for (const int vec : {1, 4, 8}) {
    const LaunchPlan held = plan_norm_backward(device, rows, cols, vec, centered);
    if (held.path == Path::regs) most = std::max<int64_t>(most, held.partial_rows);
    most = std::max<int64_t>(most, plan_row_ranges(device, rows, cols, vec).partial_rows);
  }
  return most;
}

template NormForwardKind norm_forward_kind(const RmsNormForward&, int);
template NormForwardKind norm_forward_kind(const LayerNormForward&, int);
template Launches op_launches(const DeviceProfile&, const RmsNormForward&, const Knobs*);
template Launches op_launches(const DeviceProfile&, const LayerNormForward&, const Knobs*);
template Launches op_launches(const DeviceProfile&, const RmsNormBackward&, const Knobs*);
template Launches op_launches(const DeviceProfile&, const LayerNormBackward&, const Knobs*);

}  // namespace liger::launch
