#include "launch/plan.h"

namespace liger::launch {

LaunchPlan plan_row(const DeviceProfile& device, int64_t rows, int64_t cols, const RowTiling& tiling) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.vec = tiling.vec;
  const int max_block = std::min(tiling.max_block, device.max_block_threads);
  const int64_t vectors = std::max<int64_t>(1, ceil_div(cols, tiling.vec));
  // Enough threads that each has about prefer_k vectors; k grows only where the block cannot.
  const int64_t threads = std::min<int64_t>(next_pow2(ceil_div(vectors, tiling.prefer_k)), max_block);
  const int64_t k = next_pow2(ceil_div(vectors, threads));
  plan.path = k <= tiling.max_k ? Path::regs : Path::reread;
  plan.k = static_cast<int>(std::min<int64_t>(k, tiling.max_k));
  plan.threads_per_row = static_cast<int>(threads);
  plan.block = static_cast<int>(std::max<int64_t>(threads, std::min(tiling.min_block, max_block)));
  plan.block = static_cast<int>(round_up(plan.block, device.warp));
  const int64_t rows_per_block = plan.block / plan.threads_per_row;
  plan.grid = static_cast<int>(std::min<int64_t>(std::max<int64_t>(1, ceil_div(rows, rows_per_block)), 1 << 30));
  return plan;
}

LaunchPlan plan_persistent_rows(const DeviceProfile& device, int64_t rows, int64_t cols, const RowTiling& tiling,
                                int blocks_per_multiprocessor) {
  LaunchPlan plan = plan_row(device, rows, cols, tiling);
  plan.grid = std::min(plan.grid, device.multiprocessors * blocks_per_multiprocessor);
  plan.partial_rows = plan.grid * (plan.block / plan.threads_per_row);
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

LaunchPlan plan_column_sum(const DeviceProfile& device, int64_t partial_rows, int64_t cols) {
  LaunchPlan plan;
  plan.warp = device.warp;
  plan.threads_per_row = 32;
  const int64_t groups = std::clamp<int64_t>(next_pow2(ceil_div(partial_rows, 4)), 4, 32);
  plan.block = static_cast<int>(std::min<int64_t>(32 * groups, device.max_block_threads));
  plan.smem = plan.block * static_cast<int>(sizeof(float));
  plan.grid = static_cast<int>(std::max<int64_t>(1, ceil_div(cols, 32)));
  return plan;
}

}  // namespace liger::launch
