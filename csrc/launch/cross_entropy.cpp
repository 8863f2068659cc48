#include "launch/cross_entropy.h"
#include "launch/elementwise.h"
#include "launch/losses.h"

#include <algorithm>

namespace liger::launch {
namespace {

constexpr Tunable in_place = "fused_linear_cross_entropy";
Knobs in_place_knobs(const DeviceProfile& device, const LogitsShape& of, const Knobs* given) {
  return chosen_knobs(given, device, {in_place.id, of.vec, of.rows, of.vocab});
}

// The launch for rows that a block, or a cluster, holds, with `registers` vectors of each thread in registers and the others in shared
// memory. Returns nothing if the rows cannot be held.
std::optional<Launch> held(const DeviceProfile& device, const LogitsShape& of, int registers, const Knobs& knobs,
                           const Kernel& kernel = in_place_held) {
  constexpr int most = 8;  // vectors of a thread where registers alone hold a row
  const int64_t vectors = of.vocab / of.vec;
  const bool clusters = device.resident_clusters[0][3] > 0;
  if (of.vec == 1 || of.rows > int64_t{1} << 30 || vectors < int64_t{8} * min_edge_threads) return std::nullopt;
  if (registers < held_with_chunks && (!clusters || of.element_bytes != 2)) return std::nullopt;
  LaunchPlan plan = plan_row_forward(device, of.rows, vectors * of.vec, {.vec = of.vec, .max_k = most, .max_block = 512, .k = 4}, knobs,
                                     cluster_min_vectors);
  if (clusters && vectors > int64_t{8} * 256 * most) {
    // Clusters of eight blocks. With four blocks of 256 threads per multiprocessor they fill a group of 18 multiprocessors.
    plan.path = Path::regs;
    plan.cluster = 8;
    plan.block = 256;
    plan.threads_per_row = plan.cluster * plan.block;
    plan.grid = checked_grid(std::max<int64_t>(1, of.rows) * plan.cluster);
  }
  plan.k = registers;
  plan.slots = static_cast<int>(std::max<int64_t>(0, ceil_div(vectors, plan.threads_per_row) - registers));
  plan.shared_offset = reduction_bytes(2, plan.cluster);
  plan.smem = plan.shared_offset + plan.slots * plan.block * of.vec * of.element_bytes;
  if (plan.path != Path::regs || plan.smem > shared_room(device, 1)) return std::nullopt;
  check_threads(device, plan);
  return Launch{&kernel, kernel.instance(of.vec, registers), of.rows, of.vocab, plan, in_place};
}

LaunchPlan plan_rows(const DeviceProfile& device, const LogitsShape& of, bool stash, const Knobs& knobs) {
  const LaunchPlan plan = plan_logits(device, of.rows, of.vocab, of.element_bytes, of.vec, reduction_bytes(2), stash, knobs);
  check_threads(device, plan);
  return plan;
}

}  // namespace

Launch cross_entropy_forward(const DeviceProfile& device, const LogitsShape& of, bool after_counts, const Knobs* given) {
  constexpr Tunable tunable = "cross_entropy";
  LaunchPlan plan = plan_rows(device, of, false, chosen_knobs(given, device, {tunable.id, of.vec, of.rows, of.vocab}));
  plan.pdl = device.bulk_copies && after_counts;
  const bool whole_blocks = plan.block == logits_row_threads && plan.threads_per_row == plan.block;
  const int threads = whole_blocks && of.vec > 1 && !of.full ? logits_row_threads : 0;
  return {&cross_entropy_forward_kernel, cross_entropy_forward_kernel.instance(of.vec, none, threads), of.rows, of.vocab, plan, tunable};
}

Launch cross_entropy_backward(const DeviceProfile& device, const LogitsShape& of, const Knobs* given) {
  return row_tiles(device, cross_entropy_backward_kernel, {of.rows, of.vocab, of.vec, logit_tile_k(of.vec), true}, "cross_entropy_backward",
                   given);
}

Launch cross_entropy_in_place(const DeviceProfile& device, const LogitsShape& of, bool plain, const Knobs* given) {
  const Knobs knobs = in_place_knobs(device, of, given);
  if (const auto made = held(device, of, plain ? held_in_registers : held_with_options, knobs)) return *made;
  return {&in_place_kernel, in_place_kernel.instance(of.vec), of.rows, of.vocab, plan_rows(device, of, true, knobs), in_place};
}

std::optional<Launch> cross_entropy_in_chunks(const DeviceProfile& device, const LogitsShape& of, bool tokens, int chunks,
                                              const Knobs* given) {
  if (of.element_bytes != 2 || chunks > most_vocabulary_chunks) return std::nullopt;
  const Knobs knobs = in_place_knobs(device, of, given);
  return tokens ? held(device, of, held_with_tokens, knobs, in_place_tokens) : held(device, of, held_with_chunks, knobs);
}

Launch cross_entropy_statistics(const DeviceProfile& device, const LogitsShape& of) {
  return {&statistics_kernel, statistics_kernel.instance(of.vec), of.rows, of.vocab, plan_rows(device, of, false, {})};
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

// The ops that op_plans.h lists.
namespace {

Launches loss(const DeviceProfile& device, const Call& call) {
  Launches rows;
  if (call.rows > 0) rows = {cross_entropy_forward(device, logits(call, call.rows, false), call[per_row], &call.knobs)};
  return with_sums(device, call, rows, call[per_row]);
}

// 1: rows of the gradient and of the logits start at the same offset from a multiple of 16 bytes.
const Fact equally_aligned{"equally_aligned", 1};

Launches loss_gradient(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  LogitsShape of = logits(call, call.rows, false);
  if (!call[equally_aligned]) of.vec = 1;
  return {cross_entropy_backward(device, of, &call.knobs)};
}

const Planned forward{
    "cross_entropy", loss, {&count_targets_kernel, &cross_entropy_forward_kernel, &sum_losses_kernel, &add_losses_kernel}};
const Planned backward{"cross_entropy_backward", loss_gradient, {&cross_entropy_backward_kernel}};

}  // namespace
}  // namespace liger::launch
