// What the launches of all kernels over logits share: their arguments from an op's description, and the choice of an instantiation.
#pragma once
#include "gpu/cross_entropy_rows.h"
#include "gpu/platform.h"

namespace liger::gpu {

// log(sum(exp(x'))) = base + log(sum), and what rounding took from it: in the addition, and of fp32 logits in the logarithm, where that is
// large enough to lose more than an exponential does.
struct LogSumExp {
  float high, low;
  template <class T> LIGER_DEVICE static LogSumExp of(float base, float sum, float log_sum) {
    const float high = base + log_sum, part = high - base;
    float low = (base - (high - part)) + (log_sum - part);
    if (sizeof(T) == 4 && log_sum > 2) low += fmaf(sum, expf(-log_sum), -1.f);
    return {high, low};
  }
};

// The per-row results of a forward.
struct RowOutputs {
  float *ce, *z, *lse, *accuracy;
  int64_t* predicted;
  int64_t rows;

  LIGER_DEVICE bool want_best() const { return accuracy != nullptr || predicted != nullptr; }
  template <class T, bool Full>
  LIGER_DEVICE void write(const LogitRow<T, Full>& row, float ce_value, float z_value, float lse_high, float lse_low, int64_t best) const {
    if (ce) ce[row.row] = ce_value;
    if (z) z[row.row] = z_value;
    if (lse) lse[row.row] = lse_high, lse[rows + row.row] = lse_low;
    if (accuracy) accuracy[row.row] = row.valid && best == row.target ? 1.f : 0.f;
    if (predicted) predicted[row.row] = best;
  }
};

// One thread of the row calls this. negative_log = lse - x'[target].
template <class T, bool Full>
LIGER_DEVICE void write_losses(const LogitRows& a, const RowOutputs& out, const LogitRow<T, Full>& row,
                               const RowStatistics<T, Full>& statistics, const LogSumExp& lse, float negative_log) {
  if (!row.valid) {
    const float value = row.ignored ? 0.f : not_a_number();
    return out.write(row, value, value, value, value, -1);
  }
  float ce = a.hard_share * row.target_weight * negative_log;
  if (a.class_share != 0) ce += a.class_share * (a.counts[CrossEntropyCounts::weight] * negative_log - statistics.weighted);
  float z = a.lse_square_scale != 0 ? a.lse_square_scale * lse.high * lse.high : 0.f;
  if (a.token_scaling) {
    const float token = exp_as<T>(-negative_log);
    ce *= token;
    z *= token;
  }
  out.write(row, ce, z, lse.high, lse.low, statistics.best_column);
}

template <class Op> LogitRows logit_rows(const Op& op, const launch::LaunchPlan& plan, Stream stream) {
  const CrossEntropyOptions& o = op.options;
  require(op.vocab <= int64_t{1} << 30, op.op, ": vocab_size is ", op.vocab,
          ", the columns of logits or the rows of weight: more than the GPU kernels address (2^30)");
  return {op.rows,
          op.vocab,
          op.first_row,
          op.logits.stride,
          op.logits.data,
          op.target,
          op.class_weight,
          static_cast<const float*>(op.counts),
          o.ignore_index,
          float(1 - o.label_smoothing),
          float(o.label_smoothing / double(op.vocab)),
          float(o.lse_square_scale),
          float(o.softcap),
          o.softcap == 0 ? 0.f : float(1 / o.softcap),
          o.token_scaling,
          plan.threads_per_row,
          target_report(op.op, stream.device)};
}

inline RowOutputs row_outputs(const CrossEntropyRows& op) {
  return {static_cast<float*>(op.ce),
          static_cast<float*>(op.z),
          static_cast<float*>(op.lse),
          static_cast<float*>(op.accuracy),
          op.predicted,
          op.rows};
}

// Calls start(kernel, elements of an access) with the instantiation of K that fits the logits.
template <template <class, int, bool> class K, class Op, class Start> void with_logits(const Op& op, bool vectors, bool full, Start start) {
  dispatch(op.logits.dtype, [&](auto element) {
    using T = std::remove_cvref_t<decltype(element)>;
    constexpr int width = 16 / int(sizeof(T));
    if (!vectors) start(K<T, 1, true>{}, 1);
    else if (full) start(K<T, width, true>{}, width);
    else start(K<T, width, false>{}, width);
  });
}
// Rows of groups of threads, as plan_logits has them; set(args, plan) adds what only that kernel takes. A kernel may have another one
// (OfWholeBlocks) for rows of a block of the planner's own size each.
template <template <class, int, bool> class K, class Op, class Set>
void launch_rows(const Op& op, bool vectors, bool full, bool in_place, Stream stream, Set set) {
  if (op.rows == 0 || op.vocab == 0) return;
  with_logits<K>(op, vectors, full, [&](auto kernel, int vec) {
    using Kernel = std::remove_cvref_t<decltype(kernel)>;
    const launch::DeviceProfile& device = device_profile(stream.device);
    const launch::Tunable tunable = in_place ? launch::Tunable::cross_entropy_in_place : launch::Tunable::cross_entropy;
    launch::LaunchPlan plan = launch::plan_cross_entropy(device, op.rows, op.vocab, size_of(op.logits.dtype), vec, in_place,
                                                         launch::knobs_of(device, tunable, vec, op.rows, op.vocab));
    typename Kernel::Args args{logit_rows(op, plan, stream)};
    set(args, plan);
    if constexpr (requires { typename Kernel::OfWholeBlocks; })
      if (launch::whole_block_rows(plan)) return launch<typename Kernel::OfWholeBlocks>(plan, args, stream);
    launch<Kernel>(plan, args, stream);
  });
}

// Vectors need every row start aligned; how many columns there are does not matter.
template <class Op> bool vectors_fit(const Op& op) { return aligned(op.logits, 0) && aligned(op.class_weight, 0); }
// Where the rows of one begin within 16 bytes, do those of the other?
inline bool equally_aligned(const Rows& a, const Rows& b) {
  return (reinterpret_cast<intptr_t>(a.data) - reinterpret_cast<intptr_t>(b.data)) % 16 == 0 &&
         (a.stride - b.stride) * size_of(a.dtype) % 16 == 0;
}
inline bool costly_options(const CrossEntropyOptions& o) { return o.softcap != 0 || o.label_smoothing != 0; }

}  // namespace liger::gpu
