#include "launch/cross_entropy.h"
#include "launch/losses.h"

#include <algorithm>

namespace liger::launch {
namespace {

// Path::regs if the registers of a block, or of a cluster, hold a row.
LaunchPlan plan_held(const DeviceProfile& device, const LogitsShape& of, const Knobs& knobs) {
  const int64_t vectors = of.vocab / of.vec;
  LaunchPlan plan;
  plan.path = Path::reread;
  if (vectors < int64_t{8} * min_logit_threads) return plan;
  // Of the three kernels, the one with the fewest vectors per thread that can hold the row in a cluster of blocks of 256 threads.
  const int held = vectors <= 8 * 256 * 8 ? 8 : vectors <= 8 * 256 * 10 ? 10 : 16;
  const RowTiling tiling{.vec = of.vec, .max_k = held, .max_block = 512, .k = 4};
  plan = plan_row_forward(device, of.rows, vectors * of.vec, tiling, knobs, two_blocks_from);
  if (plan.path == Path::regs) plan.k = held;
  plan.smem = reduction_bytes(2, plan.cluster);
  check_threads(device, plan);
  return plan;
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
  constexpr Tunable tunable = "cross_entropy_backward";
  const LaunchPlan plan = plan_row_tiles(device, of.rows, of.vocab, of.vec, logit_tile_k(of.vec), min_logit_threads,
                                         chosen_knobs(given, device, {tunable.id, of.vec, of.rows, of.vocab}));
  check_threads(device, plan);
  return {&cross_entropy_backward_kernel, cross_entropy_backward_kernel.instance(of.vec), of.rows, of.vocab, plan, tunable};
}

Launch cross_entropy_in_place(const DeviceProfile& device, const LogitsShape& of, bool plain, const Knobs* given) {
  constexpr Tunable tunable = "fused_linear_cross_entropy";
  const Knobs knobs = chosen_knobs(given, device, {tunable.id, of.vec, of.rows, of.vocab});
  if (plain && of.vec > 1) {
    const LaunchPlan held = plan_held(device, of, knobs);
    if (held.path == Path::regs)
      return {&in_place_registers, in_place_registers.instance(of.vec, held.k), of.rows, of.vocab, held, tunable};
  }
  return {&in_place_kernel, in_place_kernel.instance(of.vec), of.rows, of.vocab, plan_rows(device, of, true, knobs), tunable};
}

std::optional<Launch> cross_entropy_in_pieces(const DeviceProfile& device, const LogitsShape& of, bool plain, int pieces,
                                              const Knobs* given) {
  const Launch made = cross_entropy_in_place(device, of, plain, given);
  if (of.element_bytes != 2 || pieces > most_pieces || !made.of(in_place_registers)) return std::nullopt;
  return made;
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
  // A small block starts as soon as a few blocks of the rows' kernel have ended, not only when a multiprocessor is empty: so it counts
  // targets while the other blocks still run.
  if (plan.pdl && rows <= 32 * 1024) plan.block = plan.threads_per_row = std::min(plan.block, 256);
  return {&sum_losses_kernel, sum_losses_kernel.instance(), rows, 1, plan};
}

Launch add_losses(const DeviceProfile& device, int64_t rows) {
  return {&add_losses_kernel, add_losses_kernel.instance(), rows, 1, plan_elementwise(device, rows, 1)};
}

// For op_plans.h.
namespace {

Launches loss(const DeviceProfile& device, const Call& call) {
  Launches rows;
  if (call.rows > 0) rows = {cross_entropy_forward(device, logits(call, call.rows, false), call[per_row], &call.knobs)};
  return with_sums(device, call, rows, call[per_row]);
}

Launches loss_gradient(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {cross_entropy_backward(device, logits(call, call.rows, false), &call.knobs)};
}

const Planned forward{
    "cross_entropy", loss, {&count_targets_kernel, &cross_entropy_forward_kernel, &sum_losses_kernel, &add_losses_kernel}};
const Planned backward{"cross_entropy_backward", loss_gradient, {&cross_entropy_backward_kernel}};

}  // namespace
}  // namespace liger::launch
