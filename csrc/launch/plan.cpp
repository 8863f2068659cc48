#include "launch/plan.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace liger::launch {

int checked_grid(int64_t blocks) {
  if (blocks > std::numeric_limits<int32_t>::max()) throw std::length_error("a tensor needs more blocks than one launch can have");
  return static_cast<int>(std::max<int64_t>(1, blocks));
}

namespace {

// The number of clusters that are resident on the device, if each multiprocessor holds `blocks` of their blocks.
int resident_clusters(const DeviceProfile& device, int64_t cluster, int blocks = 1) {
  for (int i = 0; i < 4; ++i)
    if (cluster == 1 << i) return device.resident_clusters[blocks - 1][i];
  return 0;
}

}  // namespace

int64_t persistent_clusters(const DeviceProfile& device, int64_t cluster, int resident) {
  return resident_clusters(device, cluster, std::clamp(resident, 1, 3));
}

LaunchPlan with_cluster(const DeviceProfile& device, LaunchPlan plan, int64_t rows, int64_t cols, int k, int block, int64_t wants) {
  if (plan.vec == 1 || (plan.path == Path::regs && wants <= 1)) return plan;
  const int64_t vectors = ceil_div(cols, plan.vec), least = next_pow2(ceil_div(vectors, int64_t{block} * k));
  int64_t cluster = with_knob_pow2(least, wants, least, next_pow2(ceil_div(vectors, block)));  // every thread has a vector
  if (resident_clusters(device, cluster) == 0) cluster = least;
  if (cluster == 1 || resident_clusters(device, cluster) == 0) return plan;
  plan.path = Path::regs;
  plan.cluster = static_cast<int>(cluster);
  plan.block = block;
  plan.threads_per_row = plan.cluster * block;
  plan.k = k;
  plan.grid = checked_grid(std::max<int64_t>(1, rows) * cluster);
  return plan;
}

void check_threads(const DeviceProfile& device, const LaunchPlan& plan) {
  if (device.vendor == Vendor::amd && int64_t{plan.grid} * plan.block >= int64_t{1} << 32)
    throw std::length_error("a tensor needs more threads than one launch can have on " + std::string(device.name));
}

LaunchPlan plan_row(const DeviceProfile& device, int64_t rows, int64_t cols, const RowTiling& tiling, const Knobs& knobs) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.vec = tiling.vec;
  const int max_block = std::min(tiling.max_block, device.max_block_threads), bound = std::min(tiling.bound, device.max_block_threads);
  const int64_t vectors = std::max<int64_t>(1, ceil_div(cols, tiling.vec));
  // At least as many threads as read 128 contiguous bytes.
  const int64_t coalesced = std::min<int64_t>(next_pow2(vectors), 8);
  const auto most_k = [&](int64_t threads) {
    return tiling.long_k > 0 && threads >= tiling.long_from ? std::min(tiling.long_k, tiling.max_k) : tiling.k;
  };
  int64_t threads = std::min<int64_t>(coalesced, max_block);
  while (threads < max_block && threads * most_k(threads) < vectors) threads *= 2;
  // At least as many threads as hold the row, if a block can hold it; at most one per vector.
  const int64_t holding = next_pow2(ceil_div(vectors, tiling.max_k));
  const int64_t least = holding > bound ? std::min(tiling.min_block, bound) : std::max(coalesced, holding);
  threads = with_knob_pow2(threads, knobs.threads, least, std::min<int64_t>(next_pow2(vectors), bound));
  const int64_t k = next_pow2(ceil_div(vectors, threads));
  plan.path = k <= tiling.max_k ? Path::regs : Path::two_pass;
  plan.k = static_cast<int>(std::min<int64_t>(k, tiling.max_k));
  plan.threads_per_row = static_cast<int>(threads);
  const int64_t preferred_block = std::max<int64_t>(threads, std::min(tiling.min_block, max_block));
  const int64_t block = plan.path == Path::two_pass ? threads : with_knob_pow2(preferred_block, knobs.block, threads, bound);
  plan.block = static_cast<int>(round_up(block, device.warp));
  const int64_t rows_per_block = plan.block / plan.threads_per_row;
  plan.grid = checked_grid(ceil_div(rows, rows_per_block));
  return plan;
}

LaunchPlan plan_row_forward(const DeviceProfile& device, int64_t rows, int64_t cols, RowTiling tiling, const Knobs& knobs,
                            int64_t cluster_from) {
  const int64_t vectors = ceil_div(cols, tiling.vec);
  const bool few = few_rows(device, rows);
  if (few) tiling.k = 1, tiling.long_k = 0, tiling.max_block = tiling.bound;
  LaunchPlan plan = plan_row(device, rows, cols, tiling, knobs);
  const int blocks =
      plan.path != Path::regs || (!few && vectors >= cluster_from) ? 2 : 1;  // with_cluster() takes more if the row needs more
  if (plan.path != Path::regs)
    plan = plan_row(device, rows, cols,
                    {.vec = tiling.vec, .max_k = tiling.max_k, .max_block = tiling.bound, .bound = tiling.bound, .k = tiling.max_k}, knobs);
  return with_cluster(device, plan, rows, cols, tiling.max_k, cluster_block, knobs.wanted_blocks(blocks));
}

LaunchPlan plan_block_per_row(const DeviceProfile& device, int64_t rows, int64_t cols, int vec) {
  LaunchPlan plan;
  plan.path = Path::two_pass;
  plan.warp = device.warp;
  plan.vec = vec;
  plan.block = static_cast<int>(std::clamp<int64_t>(next_pow2(ceil_div(cols, 4 * vec)), device.warp, device.max_block_threads));
  plan.threads_per_row = plan.block;
  plan.grid = checked_grid(rows);
  return plan;
}

LaunchPlan plan_row_ranges(const DeviceProfile& device, int64_t rows, int64_t cols, int vec) {
  LaunchPlan plan;
  plan.path = Path::two_pass;
  plan.warp = device.warp;
  plan.vec = vec;
  plan.block = static_cast<int>(std::clamp<int64_t>(round_up(ceil_div(cols, vec), device.warp), device.warp, 256));
  plan.threads_per_row = plan.block;
  const int64_t tiles = ceil_div(cols, int64_t{plan.block} * vec);
  const int64_t ranges = std::clamp<int64_t>(4 * device.multiprocessors / tiles, 1, std::max<int64_t>(1, rows));
  // All ranges have the same number of rows, except for the last one; none is empty.
  plan.partial_rows = static_cast<int>(std::max<int64_t>(1, ceil_div(rows, ceil_div(std::max<int64_t>(1, rows), ranges))));
  plan.grid = checked_grid(tiles * plan.partial_rows);
  return plan;
}

LaunchPlan plan_elementwise(const DeviceProfile& device, int64_t work, int per_thread, int block) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.k = per_thread;
  plan.block = std::min(block, device.max_block_threads);
  plan.threads_per_row = plan.block;
  plan.grid = static_cast<int>(std::min<int64_t>(std::max<int64_t>(1, ceil_div(work, int64_t{plan.block} * per_thread)), 1 << 30));
  return plan;
}

LaunchPlan plan_row_tiles(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, int per_thread, int min_threads,
                          const Knobs& knobs) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.vec = vec;
  plan.k = per_thread;
  plan.block = static_cast<int>(with_knob_pow2(64, knobs.block, 64, 256));
  plan.threads_per_row =
      static_cast<int>(std::clamp<int64_t>(next_pow2(ceil_div(cols, int64_t{vec} * per_thread)), min_threads, plan.block));
  const int64_t tiles_per_row = ceil_div(cols, int64_t{plan.threads_per_row} * vec * per_thread);
  plan.grid = checked_grid(tiles_per_row * ceil_div(rows, plan.block / plan.threads_per_row));
  return plan;
}

std::pair<LaunchPlan, int64_t> plan_rope(const DeviceProfile& device, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t places,
                                         int heads_per_thread, const Knobs& knobs) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.block = static_cast<int>(with_knob_pow2(128, knobs.block, 64, 256));
  plan.lanes = static_cast<int>(std::max<int64_t>(1, places));
  plan.q_slots = static_cast<int>(ceil_div(q_heads, heads_per_thread));
  plan.k_slots = static_cast<int>(ceil_div(k_heads, heads_per_thread));
  plan.threads_per_row = plan.lanes * (plan.q_slots + plan.k_slots);
  // Thread numbers fit 31 bits, also those of the last block's idle threads.
  const int64_t most = ((int64_t{1} << 31) - plan.block) / std::max(1, plan.threads_per_row);
  const int64_t covered = std::clamp<int64_t>(most, 1, std::max<int64_t>(1, positions));
  plan.grid = checked_grid(ceil_div(covered * plan.threads_per_row, plan.block));
  return {plan, covered};
}

LaunchPlan plan_column_sum(const DeviceProfile& device, int64_t partial_rows, int64_t first_cols, int64_t second_cols) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.block = 256;
  plan.vec = first_cols % 4 == 0 && second_cols % 4 == 0 ? 4 : 1;
  plan.threads_per_row = static_cast<int>(plan.block / std::clamp<int64_t>(next_pow2(ceil_div(partial_rows, 4)), 1, 32));
  plan.smem = plan.block * plan.vec * static_cast<int>(sizeof(float));
  const int64_t width = plan.threads_per_row * plan.vec;
  plan.grid = checked_grid(ceil_div(first_cols, width) + ceil_div(second_cols, width));
  plan.pdl = device.bulk_copies;
  return plan;
}

LaunchPlan plan_logits(const DeviceProfile& device, int64_t rows, int64_t vocab, int element_bytes, int vec, int shared_bytes, bool stash,
                       const Knobs& knobs) {
  constexpr int vectors_per_thread = 8, max_resident = 2;
  // Small blocks let a multiprocessor overlap more rows. Blocks are larger where shared memory holds few rows, or the call has few.
  const int max_threads = stash || few_rows(device, rows) ? 512 : rows < 4 * device.multiprocessors ? 256 : 128;
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.vec = vec;
  plan.path = Path::two_pass;
  const int64_t vectors = std::max<int64_t>(1, ceil_div(vocab, vec));
  auto spread = [&](int limit) {
    limit = std::min(limit, device.max_block_threads);
    const int64_t bound = std::min(std::max(limit, 512), device.max_block_threads);
    const int64_t preferred = std::clamp<int64_t>(next_pow2(ceil_div(vectors, vectors_per_thread)), min_edge_threads, limit);
    const int64_t threads = with_knob_pow2(preferred, knobs.threads, min_edge_threads, std::min(next_pow2(vectors), bound));
    plan.threads_per_row = static_cast<int>(threads);
    plan.block = static_cast<int>(with_knob_pow2(std::max<int64_t>(threads, 128), knobs.block, std::max<int64_t>(threads, 64), bound));
  };
  spread(max_threads);
  plan.k = 0;
  plan.smem = plan.shared_offset = shared_bytes;
  // As many blocks per multiprocessor as possible, while four fifths of the L2 hold all vectors that are not stashed. The last resort is
  // one large block.
  for (int64_t resident = with_knob(max_resident, knobs.resident, 1, max_resident); stash && resident >= 1; --resident) {
    if (resident == 1 && plan.threads_per_row == max_threads) spread(2 * max_threads);
    const int64_t room = shared_room(device, resident) - shared_bytes;
    const int64_t slot = int64_t{plan.block} * vec * element_bytes;
    const int64_t slots = std::clamp<int64_t>(room / slot, 0, ceil_div(vectors, plan.threads_per_row));
    const int64_t left = std::max<int64_t>(0, vectors - slots * plan.threads_per_row) * vec * element_bytes;
    plan.slots = static_cast<int>(slots);
    plan.smem = static_cast<int>(shared_bytes + slots * slot);
    if (left == 0) plan.path = Path::regs;
    const int64_t in_flight = left * (plan.block / plan.threads_per_row) * resident * device.multiprocessors;
    if (in_flight <= device.l2_bytes / 5 * 4) break;
  }
  plan.grid = checked_grid(ceil_div(rows, plan.block / plan.threads_per_row));
  return plan;
}

LaunchPlan plan_block_sum(const DeviceProfile& device, int64_t n, int bytes) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.block = static_cast<int>(std::min<int64_t>(std::max<int64_t>(next_pow2(ceil_div(n, 4)), 64), device.max_block_threads));
  plan.threads_per_row = plan.block;
  plan.smem = 32 * bytes;  // a block has up to 32 warps
  return plan;
}

}  // namespace liger::launch
