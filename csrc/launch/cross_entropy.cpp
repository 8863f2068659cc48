#include "launch/cross_entropy.h"
#include "launch/elementwise.h"

#include <algorithm>
#include <cmath>

namespace liger::launch {
namespace {

constexpr Tunable in_place = "fused_linear_cross_entropy";
Knobs in_place_knobs(const DeviceProfile& device, const LogitsShape& shape, const Knobs* passed_knobs) {
  return chosen_knobs(passed_knobs, device, {in_place.id, shape.vec, shape.rows, shape.vocab});
}

// The launch for rows that a block, or a cluster, holds, with `registers` vectors of each thread in registers and the others in shared
// memory. Returns nothing if the rows cannot be held.
std::optional<Launch> held(const DeviceProfile& device, const LogitsShape& shape, int registers, const Knobs& knobs,
                           const Kernel& kernel = in_place_held) {
  constexpr int most = 8;  // vectors of a thread where registers alone hold a row
  const int64_t vectors = shape.vocab / shape.vec;
  const bool clusters = device.resident_clusters[0][3] > 0;
  if (shape.vec == 1 || shape.rows > int64_t{1} << 30 || vectors < int64_t{8} * min_edge_threads) return std::nullopt;
  if (registers < held_with_chunks && (!clusters || shape.element_bytes != 2)) return std::nullopt;
  LaunchPlan plan = plan_row_forward(device, shape.rows, vectors * shape.vec, {.vec = shape.vec, .max_k = most, .max_block = 512, .k = 4},
                                     knobs, cluster_min_vectors);
  if (clusters && vectors > int64_t{8} * 256 * most) {
    // Clusters of eight blocks. With four blocks of 256 threads per multiprocessor they fill a group of 18 multiprocessors.
    plan.path = Path::regs;
    plan.cluster = 8;
    plan.block = 256;
    plan.threads_per_row = plan.cluster * plan.block;
    plan.grid = checked_grid(std::max<int64_t>(1, shape.rows) * plan.cluster);
  }
  plan.k = registers;
  plan.slots = static_cast<int>(std::max<int64_t>(0, ceil_div(vectors, plan.threads_per_row) - registers));
  plan.shared_offset = reduction_bytes(2, plan.cluster);
  plan.smem = plan.shared_offset + plan.slots * plan.block * shape.vec * shape.element_bytes;
  if (plan.path != Path::regs || plan.smem > shared_room(device, 1)) return std::nullopt;
  check_threads(device, plan);
  return Launch{&kernel, kernel.instance(shape.vec, registers), shape.rows, shape.vocab, plan, in_place};
}

// The threads of a row in the forward, or 0 for plan_logits()'s choice: twice as many as a block of a single row has, where blocks of that
// size would leave much of the device idle while the last ones run. 64 registers of a thread limit how many blocks run at a time.
int forward_threads(const DeviceProfile& device, const LogitsShape& shape) {
  const auto used = [&](int threads) {  // the share of the device that blocks use, on average over their rounds
    const double rounds = double(shape.rows) * threads * 64 / (double(device.multiprocessors) * device.registers_per_multiprocessor);
    return rounds / std::ceil(rounds);
  };
  const int small = logits_row_threads, large = 2 * small;
  const bool full_rows = shape.rows >= 4 * device.multiprocessors && shape.vocab / shape.vec >= 8 * large;
  return full_rows && used(large) > 1.1 * used(small) ? large : 0;  // between 1 and 1.1 small blocks are faster (docs/measurements.md)
}

LaunchPlan plan_rows(const DeviceProfile& device, const LogitsShape& shape, bool stash, const Knobs& knobs) {
  const LaunchPlan plan = plan_logits(device, shape.rows, shape.vocab, shape.element_bytes, shape.vec, reduction_bytes(2), stash, knobs);
  check_threads(device, plan);
  return plan;
}

}  // namespace

Launch cross_entropy_forward(const DeviceProfile& device, const LogitsShape& shape, bool after_counts, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "cross_entropy";
  Knobs knobs = chosen_knobs(passed_knobs, device, {tunable.id, shape.vec, shape.rows, shape.vocab});
  if (knobs.threads == 0) knobs.threads = forward_threads(device, shape);
  LaunchPlan plan = plan_rows(device, shape, false, knobs);
  plan.pdl = device.bulk_copies && after_counts;
  const bool whole_blocks = plan.block == logits_row_threads && plan.threads_per_row == plan.block;
  const int threads = whole_blocks && shape.vec > 1 && !shape.full ? logits_row_threads : 0;
  return {&cross_entropy_forward_kernel,
          cross_entropy_forward_kernel.instance(shape.vec, none, threads),
          shape.rows,
          shape.vocab,
          plan,
          tunable};
}

Launch cross_entropy_backward(const DeviceProfile& device, const LogitsShape& shape, const Knobs* passed_knobs) {
  return row_tiles(device, cross_entropy_backward_kernel, {shape.rows, shape.vocab, shape.vec, logit_tile_k(shape.vec), true},
                   "cross_entropy_backward", passed_knobs);
}

Launch cross_entropy_in_place(const DeviceProfile& device, const LogitsShape& shape, bool plain, const Knobs* passed_knobs) {
  const Knobs knobs = in_place_knobs(device, shape, passed_knobs);
  if (const auto config = held(device, shape, plain ? held_in_registers : held_with_options, knobs)) return *config;
  return {&in_place_kernel, in_place_kernel.instance(shape.vec), shape.rows, shape.vocab, plan_rows(device, shape, true, knobs), in_place};
}

std::optional<Launch> cross_entropy_in_chunks(const DeviceProfile& device, const LogitsShape& shape, bool log_probs, int chunks,
                                              const Knobs* passed_knobs) {
  if (shape.element_bytes != 2 || chunks > most_vocabulary_chunks) return std::nullopt;
  const Knobs knobs = in_place_knobs(device, shape, passed_knobs);
  return log_probs ? held(device, shape, held_with_log_probs, knobs, in_place_log_probs) : held(device, shape, held_with_chunks, knobs);
}

Launch cross_entropy_statistics(const DeviceProfile& device, const LogitsShape& shape) {
  return {&statistics_kernel, statistics_kernel.instance(shape.vec), shape.rows, shape.vocab, plan_rows(device, shape, false, {})};
}

Launch cross_entropy_merge(const DeviceProfile& device, int64_t rows) {
  return {&merge_kernel, merge_kernel.instance(), rows, 1, plan_elementwise(device, rows, 1)};
}

Launch count_targets(const DeviceProfile& device, int64_t rows, int64_t vocab) {
  const LaunchPlan plan = plan_block_sum(device, std::max(rows, vocab), 3 * int(sizeof(double)));
  return {&count_targets_kernel, count_targets_kernel.instance(), rows, 1, plan};
}

Launch sum_losses(const DeviceProfile& device, int64_t rows) {
  LaunchPlan plan = plan_block_sum(device, rows, 3 * int(sizeof(double)));
  plan.pdl = device.bulk_copies;
  // A small block starts as soon as a few blocks of the kernel over rows have ended. So it counts targets while the other blocks still run;
  // a large block would start only when a multiprocessor is empty.
  if (plan.pdl && rows <= 32 * 1024) plan.block = plan.threads_per_row = std::min(plan.block, 256);
  return {&sum_losses_kernel, sum_losses_kernel.instance(), rows, 1, plan};
}

Launch add_losses(const DeviceProfile& device, int64_t rows) {
  return {&add_losses_kernel, add_losses_kernel.instance(), rows, 1, plan_elementwise(device, rows, 1)};
}

}  // namespace liger::launch
