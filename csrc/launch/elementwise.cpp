#include "launch/elementwise.h"

#include <algorithm>

namespace liger::launch {

Launch row_tiles(const DeviceProfile& device, const Kernel& kernel, const TiledRows& shape, Tunable tunable, const Knobs* passed_knobs) {
  const Knobs knobs = tunable.name ? chosen_knobs(passed_knobs, device, {tunable.id, shape.vec, shape.rows, shape.cols}) : Knobs{};
  const int64_t rows = shape.contiguous ? 1 : shape.rows, cols = shape.contiguous ? shape.rows * shape.cols : shape.cols;
  const LaunchPlan plan = plan_row_tiles(device, rows, cols, shape.vec, shape.k, shape.edges ? min_edge_threads : 1, knobs);
  check_threads(device, plan);
  return {&kernel, kernel.instance(shape.vec), rows, cols, plan, tunable};
}

Launch partial_columns(const DeviceProfile& device, int64_t rows, int64_t cols, int vec) {
  // A thread has a whole vector, or one of the single elements behind the last whole vector.
  const LaunchPlan plan = plan_row_ranges(device, rows, (cols / vec + cols % vec) * vec, vec);
  check_threads(device, plan);
  return {&partial_columns_kernel, partial_columns_kernel.instance(vec), rows, cols, plan};
}

Launch sum_columns(const DeviceProfile& device, int64_t partial_rows, int64_t first_cols, int64_t second_cols) {
  const LaunchPlan plan = plan_column_sum(device, partial_rows, first_cols, second_cols);
  return {&sum_columns_kernel, sum_columns_kernel.instance(plan.vec), partial_rows, first_cols + second_cols, plan};
}

Launch product(const DeviceProfile& device, int64_t factors) {
  LaunchPlan plan = plan_block_sum(device, factors, 0);
  plan.smem = reduction_bytes(1);
  return {&product_kernel, product_kernel.instance(), factors, 1, plan};
}

Launch op_launch(const DeviceProfile& device, const StreamCopy& op) {
  const int64_t vectors = op.bytes / 16;
  const int k = int(op.per_thread);
  const LaunchPlan plan = plan_elementwise(device, vectors, k);
  check_threads(device, plan);
  return {&stream_copy_kernel, stream_copy_kernel.instance(none, k), 1, vectors, plan};
}

}  // namespace liger::launch
