#include "launch/op_plans.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "launch/chunks.h"
#include "launch/cross_entropy.h"
#include "launch/elementwise.h"
#include "launch/glu.h"
#include "launch/norms.h"
#include "launch/rope.h"
#include "launch/softmax.h"

namespace liger::launch {
namespace {

using Launches = std::vector<Launch>;

int wide_vec(const Call& call) { return 16 / call.element_bytes; }
// Of rows whose length has to be whole vectors.
int row_vec(const Call& call) { return call.aligned && call.cols % wide_vec(call) == 0 ? wide_vec(call) : 1; }
bool empty(const Call& call) { return call.rows == 0 || call.cols == 0; }

Launches norm(const DeviceProfile& device, const Call& call, bool centered, int inputs) {
  if (empty(call)) return {};
  const int vec = row_vec(call);
  const NormForwardKind kind{.centered = centered, .two = inputs > 1, .usual = vec > 1 && !call.mixed};
  return {norm_forward(device, call.rows, call.cols, vec, kind, &call.knobs)};
}

Launches norm_gradient(const DeviceProfile& device, const Call& call, bool centered, int inputs) {
  if (empty(call)) return {};
  const NormBackwardLaunches made =
      norm_backward(device, call.rows, call.cols, row_vec(call), {centered, call.mixed, call.frozen, inputs}, &call.knobs);
  Launches out;
  if (made.means.kernel) out.push_back(made.means);
  out.push_back(made.main);
  if (!call.frozen) out.push_back(sum_columns(device, made.main.plan.partial_rows, call.cols, centered && call.bias ? call.cols : 0));
  return out;
}

template <auto Of> Launches softmax(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {Of(device, call.rows, call.cols, row_vec(call), &call.knobs)};
}

Launches gated(const DeviceProfile& device, const Call& call, const Kernel& kernel, Tunable tunable) {
  if (empty(call)) return {};
  return {glu(device, kernel, tunable, call.rows, call.cols, row_vec(call), call.contiguous, &call.knobs)};
}

Launches rotary(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  const int64_t rotary = call.rotary_dim ? call.rotary_dim : call.cols;
  const int vec = call.aligned && call.cols % wide_vec(call) == 0 && rotary / 2 % wide_vec(call) == 0 ? wide_vec(call) : 1;
  Launches out;
  for (int64_t done = 0; done < call.rows; done += out.back().rows)
    out.push_back(rope(device, {call.rows, call.q_heads, call.k_heads, call.cols, rotary}, done, vec, &call.knobs));
  return out;
}

// Rows of logits need no whole vectors; nor, without options that cost instructions, an aligned start, but `in_place`.
LogitsShape logits(const Call& call, int64_t rows, bool in_place) {
  const bool vectors = call.aligned || (!call.full && !in_place);
  return {rows, call.cols, call.element_bytes, vectors ? wide_vec(call) : 1, call.full};
}

// counted: before the rows, not by SumLosses.
Launches with_sums(const DeviceProfile& device, const Call& call, const Launches& over_rows, bool counted) {
  Launches out;
  if (counted) out.push_back(count_targets(device, call.rows, call.cols));
  out.insert(out.end(), over_rows.begin(), over_rows.end());
  if (!call.per_row) out.push_back(sum_losses(device, call.rows));
  else if (call.rows > 0) out.push_back(add_losses(device, call.rows));
  return out;
}

Launches loss(const DeviceProfile& device, const Call& call) {
  Launches rows;
  if (call.rows > 0) rows = {cross_entropy_forward(device, logits(call, call.rows, false), call.per_row, &call.knobs)};
  return with_sums(device, call, rows, call.per_row);
}

Launches loss_gradient(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {cross_entropy_backward(device, logits(call, call.rows, false), &call.knobs)};
}

// Of a fused loss whose gradients are all wanted.
Gradients mode_of(const Call& call) {
  return gradients_of(true, true, call.rows, call.chunk_rows ? call.chunk_rows : std::max<int64_t>(1, call.rows), call.per_row);
}
int piece_vec_of(const Call& call) { return call.aligned ? piece_vec : 1; }

// Sums of columns of the logits' gradient: dbias.
void add_dbias(Launches& out, const DeviceProfile& device, const Call& call, int64_t rows) {
  out.push_back(partial_columns(device, rows, call.cols, piece_vec_of(call)));
  out.push_back(sum_columns(device, out.back().plan.partial_rows, call.cols, 0));
}

void add_pieces(Launches& out, const DeviceProfile& device, const Call& call, const Kernel& kernel, int64_t rows, int64_t cols) {
  if (rows * cols > 0) out.push_back(pieces(device, kernel, rows, cols, piece_vec_of(call)));
}

// gradient: of the logits, in their place. sums: of its columns.
void add_chunk(Launches& out, const DeviceProfile& device, const Call& call, bool gradient, bool sums) {
  const int64_t rows = mode_of(call) == Gradients::deferred ? call.rows : equal_chunks(call.rows, call.chunk_rows);
  if (rows == 0) return;
  if (call.bias) add_pieces(out, device, call, fill_kernel, rows, call.cols);
  if (gradient) out.push_back(cross_entropy_in_place(device, logits(call, rows, true), !call.full, &call.knobs));
  else out.push_back(cross_entropy_forward(device, logits(call, rows, false), false, &call.knobs));
  if (call.bias && sums) add_dbias(out, device, call, rows);
}

Launches fused_loss(const DeviceProfile& device, const Call& call) {
  Launches first;
  add_chunk(first, device, call, mode_of(call) != Gradients::recomputed, mode_of(call) == Gradients::accumulated);
  return with_sums(device, call, first, true);
}

Launches fused_loss_gradient(const DeviceProfile& device, const Call& call) {
  Launches out{product(device, call.per_row ? call.rows : 1)};
  if (call.rows == 0) return out;
  if (mode_of(call) == Gradients::deferred) {
    // Matmuls write the gradients; each row's own factor goes into dx and, for dweight, into a copy of x.
    for (int i = 0; call.per_row && i < 2; ++i) add_pieces(out, device, call, scale_kernel, call.rows, call.hidden);
    if (call.bias) add_dbias(out, device, call, call.rows);
  } else {
    if (mode_of(call) == Gradients::recomputed) {
      add_pieces(out, device, call, scale_kernel, equal_chunks(call.rows, call.chunk_rows), call.hidden);
      add_chunk(out, device, call, true, true);
      add_pieces(out, device, call, scale_kernel, call.rows, call.hidden);
    } else {
      add_pieces(out, device, call, scale_kernel, 1, call.rows * call.hidden);
    }
    add_pieces(out, device, call, scale_kernel, 1, call.cols * call.hidden);
  }
  if (call.bias) add_pieces(out, device, call, scale_kernel, 1, call.cols);
  return out;
}

Launches copy(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {stream_copy(device, call.rows * call.cols * call.element_bytes / 16, 4)};
}

const std::vector<std::pair<std::string, std::function<Launches(const DeviceProfile&, const Call&)>>>& table() {
  using D = DeviceProfile;
  using C = Call;
  static const std::vector<std::pair<std::string, std::function<Launches(const DeviceProfile&, const Call&)>>> ops{
      {"rms_norm", [](const D& d, const C& c) { return norm(d, c, false, 1); }},
      {"rms_norm_backward", [](const D& d, const C& c) { return norm_gradient(d, c, false, 2); }},
      {"add_rms_norm", [](const D& d, const C& c) { return norm(d, c, false, 2); }},
      {"add_rms_norm_backward", [](const D& d, const C& c) { return norm_gradient(d, c, false, 3); }},
      {"layer_norm", [](const D& d, const C& c) { return norm(d, c, true, 1); }},
      {"layer_norm_backward", [](const D& d, const C& c) { return norm_gradient(d, c, true, 2); }},
      {"swiglu", [](const D& d, const C& c) { return gated(d, c, glu_forward, Tunable::swiglu); }},
      {"swiglu_backward", [](const D& d, const C& c) { return gated(d, c, glu_backward, Tunable::swiglu_backward); }},
      {"geglu", [](const D& d, const C& c) { return gated(d, c, glu_forward, Tunable::geglu); }},
      {"geglu_backward", [](const D& d, const C& c) { return gated(d, c, glu_backward, Tunable::geglu_backward); }},
      {"rope", rotary},
      {"rope_backward", rotary},
      {"softmax", softmax<softmax_forward>},
      {"softmax_backward", softmax<softmax_backward>},
      {"cross_entropy", loss},
      {"cross_entropy_backward", loss_gradient},
      {"fused_linear_cross_entropy", fused_loss},
      {"fused_linear_cross_entropy_backward", fused_loss_gradient},
      {"stream_copy", copy},
  };
  return ops;
}

}  // namespace

std::vector<Launch> plans(std::string_view op, const DeviceProfile& device, const Call& call) {
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

std::vector<const Kernel*> kernels() {
  const auto all = [](const auto&... kernel) { return std::vector<const Kernel*>{&kernel...}; };
  return all(norm_forward_registers, norm_forward_reread, norm_backward_rows, norm_backward_registers, norm_backward_means,
             norm_backward_tiles, sum_columns_kernel, softmax_registers, softmax_reread, softmax_backward_registers,
             softmax_backward_reread, glu_forward, glu_backward, rope_kernel, cross_entropy_forward_kernel, cross_entropy_backward_kernel,
             in_place_registers, in_place_kernel, count_targets_kernel, sum_losses_kernel, add_losses_kernel, scale_kernel, fill_kernel,
             partial_columns_kernel, product_kernel, stream_copy_kernel);
}

}  // namespace liger::launch
