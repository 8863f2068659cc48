#include "launch/op_plans.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "launch/chunks.h"

namespace liger::launch {
namespace {

// HIP takes fewer than 2^32 threads in a launch; CUDA any number of blocks that plan.cpp allows.
LaunchPlan checked(const DeviceProfile& device, const LaunchPlan& plan) {
  if (device.vendor == Vendor::amd && int64_t{plan.grid} * plan.block >= int64_t{1} << 32)
    throw std::length_error("a tensor needs more threads than one launch can have on " + std::string(device.name));
  return plan;
}

}  // namespace

LaunchPlan plan_norm_forward(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, NormForwardKind kind, const Knobs& knobs) {
  // Measured on an H200: of two tensors, 2 vectors of each are best, and 8 too many for a thread; of one, 5 are better than 2 or 3 in twice
  // as many threads. Variances take longer to merge: 6 vectors in half the threads, and blocks of 256.
  RowForwardKind row{.half_from = 64};
  if (kind.two) row = {.prefer_k = 2, .block_k = 4};
  if (kind.centered) row = {.block = cols <= 256 * norm_forward_k(vec) * vec ? 256 : 512, .half_from = 128, .half_k = 6};
  LaunchPlan plan = plan_row_forward(device, rows, cols, vec, norm_forward_k(vec), row, knobs);
  plan.smem = reduction_bytes(kind.centered ? 2 : 1, plan.cluster);
  return checked(device, plan);
}

NormBackwardPlans plan_norm_backward_paths(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, NormBackwardKind kind,
                                           const Knobs& knobs) {
  NormBackwardPlans plans;
  if (kind.frozen && !kind.mixed && vec > 1) {
    const bool few = few_rows(device, rows);
    const int most = !few && ceil_div(cols, vec) <= 256 * 4 ? 256 : norm_backward_rows_threads;
    LaunchPlan by_rows =
        plan_row(device, rows, cols, {.vec = vec, .max_block = most, .prefer_k = few ? 1 : 2, .half_from = few ? 0 : 64, .half_k = 3});
    if (by_rows.path == Path::regs) {
      by_rows.k = std::max(2, by_rows.k);
      by_rows.smem = reduction_bytes(kind.centered ? 2 : 1);
      plans.rows = checked(device, by_rows);
      return plans;
    }
  }
  LaunchPlan& plan = plans.sums = plan_norm_backward(device, rows, cols, vec, norm_backward_threads(device, kind.centered, vec),
                                                     norm_backward_max_k(device, kind.centered), knobs);
  if (plan.path == Path::regs && !kind.mixed) {
    const int groups = std::max(1, plan.block / plan.threads_per_row), reduction = reduction_bytes(2, plan.cluster);
    plan.smem = reduction;
    if (device.bulk_copies || !kind.centered)
      add_ring(device, plan, rows, kind.inputs, reduction, norm_backward_resident(plan, knobs), knobs.stages);
    // Rows that share a block add up their sums in shared memory, in place of the ring.
    if (groups > 1) plan.smem = std::max(plan.smem, reduction + groups * (kind.centered ? 2 : 1) * int(cols) * int(sizeof(float)));
    if (knobs == Knobs{}) return plans;
    if (plan.smem > device.shared_per_block_optin) {  // fewer rows to a block, then
      Knobs smaller = knobs;
      smaller.block = plan.block / 2;
      return plan_norm_backward_paths(device, rows, cols, vec, kind, smaller);
    }
    plan.partial_rows = static_cast<int>(std::min<int64_t>(plan.partial_rows, norm_partial_rows(device, rows, cols, kind.centered)));
    plan.grid = plan.partial_rows * plan.cluster;
    return plans;
  }
  plans.sums = checked(device, plan_norm_tiles(device, rows, cols, vec));
  plans.means = checked(device, plan_block_per_row(device, rows, cols, vec));
  plans.means.smem = reduction_bytes(2);
  return plans;
}

int64_t norm_partial_rows(const DeviceProfile& device, int64_t rows, int64_t cols, bool centered) {
  int64_t most = 1;
  for (const int vec : {1, 4, 8}) {
    const LaunchPlan held =
        plan_norm_backward(device, rows, cols, vec, norm_backward_threads(device, centered, vec), norm_backward_max_k(device, centered));
    if (held.path == Path::regs) most = std::max<int64_t>(most, held.partial_rows);
    most = std::max<int64_t>(most, plan_norm_tiles(device, rows, cols, vec).partial_rows);
  }
  return most;
}

// Rows of so many vectors, which would fill 512 threads with eight each, are 1.5 % faster in two blocks of 256.
constexpr int two_blocks_from = 512 * softmax_forward_k / 4 * 3;

LaunchPlan plan_softmax(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, int wide_k, const Knobs& knobs) {
  const RowForwardKind kind{.cluster_from = wide_k == softmax_forward_k ? two_blocks_from : 0};
  LaunchPlan plan = plan_row_forward(device, rows, cols, vec, vec == 1 ? 4 : wide_k, kind, knobs);
  plan.smem = reduction_bytes(2, plan.cluster);
  return checked(device, plan);
}

LaunchPlan plan_glu(const DeviceProfile& device, int64_t rows, int64_t cols, int vec, const Knobs& knobs) {
  return checked(device, plan_row_tiles(device, rows, cols, vec, glu_k, 1, knobs));
}

RopePlan plan_rope_heads(const DeviceProfile& device, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t head_dim,
                         int64_t rotary_dim, int vec, const Knobs& knobs) {
  const int64_t places = rotary_dim / 2 / vec + ceil_div((head_dim - rotary_dim) / vec, 2);
  const RopePlan plan = plan_rope(device, positions, q_heads, k_heads, places, rope_heads_in_flight, knobs);
  checked(device, plan.launch);
  return plan;
}

LaunchPlan plan_cross_entropy(const DeviceProfile& device, int64_t rows, int64_t vocab, int element_bytes, int vec, bool in_place,
                              const Knobs& knobs) {
  LaunchPlan plan = plan_logits(device, rows, vocab, element_bytes, vec, reduction_bytes(2), in_place, knobs);
  plan.pdl = device.bulk_copies && !in_place;  // if the counts are all that it follows
  return checked(device, plan);
}
LaunchPlan plan_cross_entropy_held(const DeviceProfile& device, int64_t rows, int64_t vocab, int vec, const Knobs& knobs) {
  const int64_t vectors = vocab / vec;
  LaunchPlan plan;
  plan.path = Path::reread;
  if (vectors < int64_t{softmax_forward_k} * min_logit_threads) return plan;
  // Of the three kernels the one with the fewest vectors a thread that hold the row in clusters of blocks of 256.
  const int held = vectors <= 8 * 256 * 8 ? 8 : vectors <= 8 * 256 * 10 ? 10 : 16;
  plan = plan_row_forward(device, rows, vectors * vec, vec, held, {.cluster_from = two_blocks_from}, knobs);
  if (plan.path == Path::regs) plan.k = held;
  plan.smem = reduction_bytes(2, plan.cluster);
  return checked(device, plan);
}
LaunchPlan plan_cross_entropy_tiles(const DeviceProfile& device, int64_t rows, int64_t vocab, int vec, const Knobs& knobs) {
  return checked(device, plan_row_tiles(device, rows, vocab, vec, logit_tile_k(vec), min_logit_threads, knobs));
}
LaunchPlan plan_cross_entropy_counts(const DeviceProfile& device, int64_t rows, int64_t vocab) {
  return plan_block_sum(device, std::max(rows, vocab), 3 * int(sizeof(double)));
}
LaunchPlan plan_cross_entropy_reduce(const DeviceProfile& device, int64_t rows, bool each) {
  if (each) return plan_elementwise(device, rows, 1);
  LaunchPlan plan = plan_block_sum(device, rows, 3 * int(sizeof(double)));
  plan.pdl = device.bulk_copies;
  // A block that starts as soon as a few of the rows' blocks have ended, not when a multiprocessor is empty, counts while others still run.
  if (plan.pdl && rows <= 32 * 1024) plan.block = plan.threads_per_row = std::min(plan.block, 256);
  return plan;
}

LaunchPlan plan_row_pieces(const DeviceProfile& device, int64_t rows, int64_t cols, int vec) {
  return checked(device, plan_pieces(device, rows, ceil_div(cols, vec), piece_k));
}
LaunchPlan plan_column_shares(const DeviceProfile& device, int64_t rows, int64_t cols, int vec) {
  // Threads own whole vectors, and one element each behind them.
  return checked(device, plan_norm_tiles(device, rows, (cols / vec + cols % vec) * vec, vec));
}
LaunchPlan plan_scalar(const DeviceProfile& device, int64_t factors) {
  LaunchPlan plan = plan_block_sum(device, factors, 0);
  plan.smem = reduction_bytes(1);
  return plan;
}
LaunchPlan plan_stream_copy(const DeviceProfile& device, int64_t vectors, int per_thread) {
  return checked(device, plan_elementwise(device, vectors, per_thread));
}

namespace {

using Launches = std::vector<NamedLaunch>;

int wide(const Call& call) { return 16 / call.element_bytes; }
// Of rows whose length has to be whole vectors.
int row_vec(const Call& call) { return call.aligned && call.cols % wide(call) == 0 ? wide(call) : 1; }

// groups: one of columns, or two.
void column_sum(Launches& out, const DeviceProfile& device, int64_t partial_rows, int64_t cols, int groups = 1) {
  out.push_back({"SumColumns", {}, partial_rows, cols, plan_column_sum(device, partial_rows, cols, groups > 1 ? cols : 0), piece_threads});
}

bool empty(const Call& call) { return call.rows == 0 || call.cols == 0; }

Launches norm_forward(const DeviceProfile& device, const Call& call, bool centered, int inputs, Tunable tunable) {
  if (empty(call)) return {};
  const int vec = row_vec(call);
  const NormForwardKind kind{centered, inputs > 1};
  const LaunchPlan plan = plan_norm_forward(device, call.rows, call.cols, vec, kind, call.knobs);
  if (plan.path == Path::reread) return {{"NormForwardReread", {vec}, call.rows, call.cols, plan, row_threads, tunable}};
  const int k = vec == 1 ? 4 : plan.k, bound = plan.cluster > 1 ? norm_cluster_bound(kind) : row_threads;
  return {{"NormForwardRegisters", {vec, k, bound}, call.rows, call.cols, plan, bound, tunable}};
}

Launches norm_backward(const DeviceProfile& device, const Call& call, bool centered, int inputs, Tunable tunable) {
  if (empty(call)) return {};
  Launches out;
  const int vec = row_vec(call);
  const NormBackwardPlans plans =
      plan_norm_backward_paths(device, call.rows, call.cols, vec, {centered, call.mixed, call.frozen, inputs}, call.knobs);
  if (plans.rows) return {{"NormBackwardRows", {vec, plans.rows->k}, call.rows, call.cols, *plans.rows, norm_backward_rows_threads}};
  if (plans.sums.path == Path::regs) {
    const LaunchPlan& plan = plans.sums;
    const int threads = vec == 1 || plan.threads_per_row < 256 ? 0 : std::min(plan.threads_per_row, plan.block);
    out.push_back({"NormBackwardRegisters", {vec, plan.k, threads}, call.rows, call.cols, plan, norm_backward_bound(threads), tunable});
  } else {
    out.push_back({"NormBackwardMeans", {vec}, call.rows, call.cols, plans.means, row_threads});
    out.push_back({"NormBackwardTiles", {vec}, call.rows, call.cols, plans.sums, piece_threads});
  }
  if (!call.frozen) column_sum(out, device, plans.sums.partial_rows, call.cols, centered && call.bias ? 2 : 1);
  return out;
}

Launches softmax(const DeviceProfile& device, const Call& call, const std::string& kernel, int wide_k, Tunable tunable) {
  if (empty(call)) return {};
  const int vec = row_vec(call);
  const LaunchPlan plan = plan_softmax(device, call.rows, call.cols, vec, wide_k, call.knobs);
  if (plan.path == Path::reread) return {{kernel + "Reread", {vec}, call.rows, call.cols, plan, row_threads, tunable}};
  return {{kernel + "Registers", {vec, vec == 1 ? 4 : plan.k}, call.rows, call.cols, plan, row_threads, tunable}};
}

Launches glu(const DeviceProfile& device, const Call& call, const char* kernel, Tunable tunable) {
  if (empty(call)) return {};
  const int vec = row_vec(call);
  const int64_t rows = call.contiguous ? 1 : call.rows, cols = call.contiguous ? call.rows * call.cols : call.cols;
  return {{kernel, {vec}, rows, cols, plan_glu(device, rows, cols, vec, call.knobs), piece_threads, tunable}};
}

Launches rope(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  const int64_t rotary = call.rotary_dim ? call.rotary_dim : call.cols;
  const int vec = call.aligned && call.cols % wide(call) == 0 && rotary / 2 % wide(call) == 0 ? wide(call) : 1;
  Launches out;
  for (int64_t done = 0; done < call.rows; done += out.back().rows) {
    const RopePlan plan = plan_rope_heads(device, call.rows - done, call.q_heads, call.k_heads, call.cols, rotary, vec, call.knobs);
    out.push_back({"RopeKernel", {vec}, plan.positions, call.cols, plan.launch, piece_threads, Tunable::rope});
  }
  return out;
}

// Rows of logits need no whole vectors, only an aligned start.
Launches logits(const DeviceProfile& device, const Call& call, int64_t rows, const char* kernel, bool in_place) {
  if (rows == 0) return {};
  const int vec = call.aligned ? wide(call) : 1;
  const Tunable tunable = in_place ? Tunable::cross_entropy_in_place : Tunable::cross_entropy;
  if (in_place && vec > 1) {
    const LaunchPlan held = plan_cross_entropy_held(device, rows, call.cols, vec, call.knobs);
    if (held.path == Path::regs) return {{"InPlaceRegisters", {vec, held.k}, rows, call.cols, held, in_place_bound(held.k), tunable}};
  }
  const LaunchPlan plan = plan_cross_entropy(device, rows, call.cols, call.element_bytes, vec, in_place, call.knobs);
  if (in_place) return {{kernel, {vec}, rows, call.cols, plan, row_threads, tunable}};
  const int threads = vec > 1 && whole_block_rows(plan) ? logits_row_threads : 0;  // without options that cost registers
  return {{kernel, {vec, threads}, rows, call.cols, plan, threads > 0 ? threads : logits_threads, tunable}};
}

// Without options that cost registers, unaligned rows have vectors, too.
Launches logit_tiles(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  const int vec = call.aligned ? wide(call) : 1;
  const LaunchPlan plan = plan_cross_entropy_tiles(device, call.rows, call.cols, vec, call.knobs);
  return {{"Backward", {vec}, call.rows, call.cols, plan, piece_threads, Tunable::cross_entropy_backward}};
}

// counted: before the rows, not by SumLosses.
Launches with_sums(const DeviceProfile& device, const Call& call, const Launches& over_rows, bool counted) {
  Launches out;
  const LaunchPlan counts = plan_cross_entropy_counts(device, call.rows, call.cols);
  if (counted) out.push_back({"CountTargets", {}, call.rows, call.cols, counts, row_threads});
  out.insert(out.end(), over_rows.begin(), over_rows.end());
  const LaunchPlan reduce = plan_cross_entropy_reduce(device, call.rows, call.per_row);
  if (!call.per_row) out.push_back({"SumLosses", {}, call.rows, 1, reduce, row_threads});
  else if (call.rows > 0) out.push_back({"AddLosses", {}, call.rows, 1, reduce, piece_threads});
  return out;
}

// The fused loss's ways to the gradients are those of ops/fused_linear_cross_entropy.cpp.
bool one_chunk(const Call& call) { return call.chunk_rows == 0 || call.chunk_rows >= call.rows; }
bool recomputed(const Call& call) { return !one_chunk(call) && call.per_row; }
int piece_vec_of(const Call& call) { return call.aligned ? piece_vec : 1; }

// Sums of columns of the logits' gradient: dbias.
void dbias(Launches& out, const DeviceProfile& device, const Call& call, int64_t rows) {
  const int vec = piece_vec_of(call);
  const LaunchPlan shares = plan_column_shares(device, rows, call.cols, vec);
  out.push_back({"PartialColumns", {vec}, rows, call.cols, shares, piece_threads});
  column_sum(out, device, shares.partial_rows, call.cols);
}

void pieces(Launches& out, const DeviceProfile& device, const Call& call, const char* kernel, int64_t rows, int64_t cols) {
  if (rows * cols == 0) return;
  const int vec = piece_vec_of(call);
  out.push_back({kernel, {vec}, rows, cols, plan_row_pieces(device, rows, cols, vec), piece_threads});
}

void chunk(Launches& out, const DeviceProfile& device, const Call& call, const char* kernel, bool gradients) {
  const int64_t rows = one_chunk(call) ? call.rows : equal_chunks(call.rows, call.chunk_rows);
  if (rows == 0) return;
  if (call.bias) pieces(out, device, call, "Fill", rows, call.cols);
  for (NamedLaunch& launch : logits(device, call, rows, kernel, kernel == std::string_view("InPlace"))) out.push_back(std::move(launch));
  if (call.bias && gradients) dbias(out, device, call, rows);
}

Launches fused_loss(const DeviceProfile& device, const Call& call) {
  Launches first;
  chunk(first, device, call, recomputed(call) ? "Forward" : "InPlace", !one_chunk(call) && !recomputed(call));
  return with_sums(device, call, first, true);
}

Launches fused_loss_backward(const DeviceProfile& device, const Call& call) {
  const int64_t factors = call.per_row ? call.rows : 1;
  Launches out{{"Product", {}, factors, 1, plan_scalar(device, factors), row_threads}};
  if (call.rows == 0) return out;
  if (one_chunk(call)) {
    // Matmuls write the gradients; each row's own factor goes into dx and, for dweight, into a copy of x.
    for (int i = 0; call.per_row && i < 2; ++i) pieces(out, device, call, "Scale", call.rows, call.hidden);
    if (call.bias) dbias(out, device, call, call.rows);
  } else {
    if (recomputed(call)) {
      pieces(out, device, call, "Scale", equal_chunks(call.rows, call.chunk_rows), call.hidden);
      chunk(out, device, call, "InPlace", true);
      pieces(out, device, call, "Scale", call.rows, call.hidden);
    } else {
      pieces(out, device, call, "Scale", 1, call.rows * call.hidden);
    }
    pieces(out, device, call, "Scale", 1, call.cols * call.hidden);
  }
  if (call.bias) pieces(out, device, call, "Scale", 1, call.cols);
  return out;
}

Launches stream_copy(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  const int64_t vectors = call.rows * call.cols * call.element_bytes / 16;
  return {{"StreamCopyKernel", {4}, 1, vectors, plan_stream_copy(device, vectors, 4), piece_threads}};
}

const std::vector<std::pair<std::string, std::function<Launches(const DeviceProfile&, const Call&)>>>& table() {
  using D = DeviceProfile;
  using C = Call;
  static const std::vector<std::pair<std::string, std::function<Launches(const DeviceProfile&, const Call&)>>> ops{
      {"rms_norm", [](const D& d, const C& c) { return norm_forward(d, c, false, 1, Tunable::rms_norm); }},
      {"rms_norm_backward", [](const D& d, const C& c) { return norm_backward(d, c, false, 2, Tunable::rms_norm_backward); }},
      {"add_rms_norm", [](const D& d, const C& c) { return norm_forward(d, c, false, 2, Tunable::add_rms_norm); }},
      {"add_rms_norm_backward", [](const D& d, const C& c) { return norm_backward(d, c, false, 3, Tunable::add_rms_norm_backward); }},
      {"layer_norm", [](const D& d, const C& c) { return norm_forward(d, c, true, 1, Tunable::layer_norm); }},
      {"layer_norm_backward", [](const D& d, const C& c) { return norm_backward(d, c, true, 2, Tunable::layer_norm_backward); }},
      {"swiglu", [](const D& d, const C& c) { return glu(d, c, "GluForwardKernel", Tunable::swiglu); }},
      {"swiglu_backward", [](const D& d, const C& c) { return glu(d, c, "GluBackwardKernel", Tunable::swiglu_backward); }},
      {"geglu", [](const D& d, const C& c) { return glu(d, c, "GluForwardKernel", Tunable::geglu); }},
      {"geglu_backward", [](const D& d, const C& c) { return glu(d, c, "GluBackwardKernel", Tunable::geglu_backward); }},
      {"rope", rope},
      {"rope_backward", rope},
      {"softmax", [](const D& d, const C& c) { return softmax(d, c, "Softmax", softmax_forward_k, Tunable::softmax); }},
      {"softmax_backward",
       [](const D& d, const C& c) { return softmax(d, c, "SoftmaxBackward", softmax_backward_k, Tunable::softmax_backward); }},
      {"cross_entropy", [](const D& d, const C& c) { return with_sums(d, c, logits(d, c, c.rows, "Forward", false), c.per_row); }},
      {"cross_entropy_backward", logit_tiles},
      {"fused_linear_cross_entropy", fused_loss},
      {"fused_linear_cross_entropy_backward", fused_loss_backward},
      {"stream_copy", stream_copy},
  };
  return ops;
}

}  // namespace

std::vector<NamedLaunch> plans(std::string_view op, const DeviceProfile& device, const Call& call) {
  std::string known;
  for (const auto& [name, planned] : table()) {
    if (name == op) return planned(device, call);
    known += (known.empty() ? "" : ", ") + name;
  }
  throw std::invalid_argument("no op is called '" + std::string(op) + "'; known: " + known);
}

std::vector<std::string> planned_ops() {
  std::vector<std::string> names;
  for (const auto& [name, planned] : table()) names.push_back(name);
  return names;
}

}  // namespace liger::launch
