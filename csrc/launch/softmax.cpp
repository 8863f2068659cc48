#include "launch/softmax.h"

#include <algorithm>

#include "kernels/aligned.h"

namespace liger::launch {
namespace {

struct SoftmaxShape {
  int64_t rows, cols;
  int vec;     // elements per access: 16 bytes, if all tensors' rows start at the same offset from a multiple of 16 bytes; else 1
  bool whole;  // all rows are aligned to 16 bytes and consist of whole vectors
};
SoftmaxShape softmax_shape(int64_t rows, int64_t cols, std::initializer_list<Rows> tensors) {
  const Rows& first = *tensors.begin();
  bool whole = true, alike = true;
  for (const Rows& tensor : tensors) {
    whole &= aligned(tensor, cols);
    alike &= equally_aligned(tensor, first);
  }
  return {rows, cols, alike ? 16 / int(dtype_bytes(first.dtype)) : 1, whole};
}

struct Direction {
  const Kernel &registers, &any_length;
  int k;       // the most vectors of each input in a thread's registers
  int inputs;  // number of tensors that the kernel reads: x; or dy and y
  Tunable tunable;
};

// Several blocks share rows of more vectors than this, which is then faster (docs/measurements.md).
constexpr int64_t most_in_block = 2048;
// The same for calls of few rows.
constexpr int64_t most_in_block_few_rows = 1024;
// A row that does not consist of whole vectors takes at least min_edge_threads threads with at least four vectors each. Shorter rows are
// read element by element.
constexpr int64_t least_with_edges = 4 * min_edge_threads;

// The number of blocks that share a row: 1, or the size of a cluster that the device supports.
int64_t row_blocks(const DeviceProfile& device, const SoftmaxShape& shape, int k, const Knobs& knobs) {
  const bool few = few_rows(device, shape.rows);
  const int64_t vectors = shape.cols / shape.vec;
  // Blocks of 256 threads: as few as hold the row in registers or, for few rows, as many as give each thread one vector.
  const int64_t holding = next_pow2(ceil_div(vectors, 256 * k)), most = next_pow2(ceil_div(vectors, 256));
  const int64_t preferred = vectors <= (few ? most_in_block_few_rows : most_in_block) ? 1 : few ? most : holding;
  const int64_t asked = knobs.wanted_blocks(preferred);
  if (shape.vec == 1 || (asked == 1 && (preferred == 1 || vectors <= 1024 * k))) return 1;
  const int64_t wanted = with_knob_pow2(preferred, asked, holding, most);
  int64_t blocks = 1;
  for (int i = 1; i < 4; ++i)
    if (device.resident_clusters[0][i] > 0 && 1 << i <= wanted) blocks = 1 << i;
  return blocks;
}

// Plans one block per row, or one block for several rows. A thread processes four vectors, or more if four would need more than 2,048 / k
// threads. In a call of few rows a thread processes one vector, or more if a block has too few threads for that.
LaunchPlan plan_in_block(const DeviceProfile& device, const SoftmaxShape& shape, int k, const Knobs& knobs) {
  const int preferred_block = static_cast<int>(most_in_block) / k;
  const bool few = few_rows(device, shape.rows), large = few || shape.vec == 1;
  LaunchPlan plan = plan_row(device, shape.rows, shape.cols,
                             {.vec = shape.vec, .max_k = k, .max_block = large ? 1024 : preferred_block, .k = few ? 1 : 4}, knobs);
  plan.smem = reduction_bytes(2);
  return plan;
}

// Any row: plan.k vectors per thread are in registers, and plan.slots in shared memory, as many as fit. The kernel reads the others twice
// (path two_pass).
LaunchPlan plan_any_length(const DeviceProfile& device, const SoftmaxShape& shape, int k, int inputs, const Knobs& knobs) {
  const int64_t vectors = std::max<int64_t>(1, shape.cols / shape.vec), blocks = row_blocks(device, shape, k, knobs);
  const bool few = few_rows(device, shape.rows);
  int64_t threads;  // of a block for the row
  if (blocks > 1) {
    // Four blocks of 256 threads on a multiprocessor overlap better than two of 512, except where shared memory would hold more than two
    // vectors per thread. Few rows have nothing to overlap with.
    const bool small = vectors <= blocks * (few ? 512 : 256 * (k + 2));
    threads = with_knob_pow2(small ? 256 : 512, knobs.block, 256, 512);
  } else {
    // As many vectors per thread as registers hold: fewer vectors in more threads are slower, except in calls of few rows.
    const int64_t holding = std::clamp<int64_t>(next_pow2(ceil_div(vectors, k)), min_edge_threads, 1024);
    threads = with_knob_pow2(std::clamp<int64_t>(few ? next_pow2(vectors) : holding, holding, 1024), knobs.threads, holding, 1024);
  }
  // plan_row chooses block and grid, as for rows with one vector per thread.
  const Knobs block_knobs{.block = blocks > 1 ? 0 : knobs.block};
  LaunchPlan plan = plan_row(device, shape.rows * blocks, threads * shape.vec, {.vec = shape.vec, .max_k = 1, .k = 1}, block_knobs);
  plan.cluster = static_cast<int>(blocks);
  plan.threads_per_row = static_cast<int>(threads * blocks);
  plan.shared_offset = plan.smem = reduction_bytes(2, plan.cluster);
  // A multiprocessor's shared memory is divided among the blocks that its registers have room for: 1,024 threads with 64 registers each.
  const int64_t slot = int64_t{plan.block} * inputs * 16, resident = std::max(1, 1024 / plan.block);
  const int64_t room = shared_room(device, resident) - plan.smem;
  const int64_t missing = std::max<int64_t>(0, ceil_div(vectors, plan.threads_per_row) - k);
  const int64_t slots = shape.vec == 1 ? 0 : std::min(missing, std::max<int64_t>(0, room / slot));
  plan.k = k;
  plan.slots = static_cast<int>(slots);
  plan.smem += static_cast<int>(slots * slot);
  plan.path = missing == slots ? Path::regs : Path::two_pass;
  return plan;
}

Launch softmax(const DeviceProfile& device, SoftmaxShape shape, const Direction& direction, const Knobs* passed_knobs) {
  if ((!shape.whole && shape.cols < least_with_edges * shape.vec) || shape.cols >= int64_t{1} << 30) shape.vec = 1;
  const bool edges = shape.vec > 1 && !shape.whole;
  const int k = shape.vec == 1 ? 4 : direction.k;
  const Knobs knobs = chosen_knobs(passed_knobs, device, {direction.tunable.id, shape.vec, shape.rows, shape.cols});
  const auto launch = [&](const Kernel& kernel, int registers, const LaunchPlan& plan) {
    check_threads(device, plan);
    return Launch{&kernel, kernel.instance(shape.vec, registers), shape.rows, shape.cols, plan, direction.tunable};
  };
  if (!edges && row_blocks(device, shape, k, knobs) == 1) {
    const LaunchPlan plan = plan_in_block(device, shape, k, knobs);
    if (plan.path == Path::regs) return launch(direction.registers, shape.vec == 1 ? k : plan.k, plan);
  }
  const LaunchPlan plan = plan_any_length(device, shape, k, direction.inputs, knobs);
  const bool held = !edges && plan.path == Path::regs && plan.slots == 0;
  return launch(held ? direction.registers : direction.any_length, k, plan);
}

}  // namespace

Launch op_launch(const DeviceProfile& device, const SoftmaxForward& op, const Knobs* knobs) {
  const SoftmaxShape shape = softmax_shape(op.rows, op.cols, {op.x, {op.y.data, op.y.stride, op.y.dtype}});
  return softmax(device, shape, {softmax_registers, softmax_long, softmax_forward_k, 1, "softmax"}, knobs);
}
Launch op_launch(const DeviceProfile& device, const SoftmaxBackward& op, const Knobs* knobs) {
  const SoftmaxShape shape = softmax_shape(op.rows, op.cols, {op.dy, op.y, {op.dx.data, op.dx.stride, op.dx.dtype}});
  return softmax(device, shape, {softmax_backward_registers, softmax_backward_long, softmax_backward_k, 2, "softmax_backward"}, knobs);
}

}  // namespace liger::launch
