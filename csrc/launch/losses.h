// Helpers that list cross_entropy's launches for op_plans.h, and facts on which the launches of cross_entropy and of the fused loss
// (trace/fused_loss_plans.cpp) depend. A fact (op_plans.h) is a property of a call, such as reduction "none".
#pragma once
#include "launch/cross_entropy.h"
#include "launch/op_plans.h"

namespace liger::launch {

inline const Fact full{"full"};        // options that cost instructions per element
inline const Fact per_row{"per_row"};  // reduction "none"

// The shape of rows of logits. The length of a row need not be a multiple of the elements per access. Only the in-place kernel requires
// aligned rows.
inline LogitsShape logits(const Call& call, int64_t rows, bool in_place) {
  const bool vectors = call.aligned || !in_place;
  return {rows, call.cols, call.element_bytes, vectors ? wide_vec(call) : 1, call[full] != 0};
}

// Returns the launches over rows with the sums before and behind them. counted: CountTargets runs before the rows; otherwise SumLosses
// counts the targets.
inline Launches with_sums(const DeviceProfile& device, const Call& call, const Launches& over_rows, bool counted) {
  Launches out;
  if (counted) out.push_back(count_targets(device, call.rows, call.cols));
  out.insert(out.end(), over_rows.begin(), over_rows.end());
  if (!call[per_row]) out.push_back(sum_losses(device, call.rows));
  else if (call.rows > 0) out.push_back(add_losses(device, call.rows));
  return out;
}

}  // namespace liger::launch
