// Functions that the kernels over rows of logits share: the conversion of an op's arguments (kernels/cross_entropy.h) to the kernels'
// arguments, the selection of the kernel instance, and the stores of a row's results.
#pragma once
#include "gpu/cross_entropy_rows.h"
#include "gpu/platform.h"
#include "launch/arguments.h"

namespace liger::gpu {

// log(sum(exp(x'))) = high + low: high is the rounded sum base + log(sum), and low the rounding error of this addition. For fp32 logits low
// also has the error of the logarithm, if log(sum) is so large that this error exceeds the one of an exponential.
struct LogSumExp {
  float high, low;
  template <class T> LIGER_DEVICE static LogSumExp compute(const Exponentials& row, float log_sum) {
    const float base = row.base(), high = base + log_sum, part = high - base;
    float low = (base - (high - part)) + (log_sum - part);
    if (sizeof(T) == 4 && log_sum > 2) low += fmaf(row.sum, expf(-log_sum), -1.f);
    return {high, low};
  }
};

// The per-row results of a forward. Optional results are null pointers.
struct RowOutputs {
  float *ce, *z, *lse, *accuracy;
  int64_t* predicted;
  int64_t rows;
  float *entropy, *mean, *log_sum_sq;

  LIGER_DEVICE bool want_best() const { return accuracy != nullptr || predicted != nullptr; }
  template <class T, bool Full, bool LogProbs>
  LIGER_DEVICE void write(const LogitRow<T, Full, LogProbs>& row, float ce_value, float z_value, float lse_high, float lse_low,
                          int64_t best) const {
    if (ce) ce[row.row] = ce_value;
    if (z) z[row.row] = z_value;
    if (lse) lse[row.row] = lse_high, lse[rows + row.row] = lse_low;
    if (accuracy) accuracy[row.row] = row.valid && best == row.target ? 1.f : 0.f;
    if (predicted) predicted[row.row] = best;
  }
  template <class Row>
  LIGER_DEVICE void write_moments(const Row& row, float entropy_value, float mean_value, float log_sum_sq_value) const {
    const auto put = [&](float* array, float value) {
      if (array) array[row.row] = row.valid ? value : row.ignored ? 0.f : not_a_number();
    };
    put(entropy, entropy_value);
    put(mean, mean_value);
    put(log_sum_sq, log_sum_sq_value);
  }
};

// The factor by which token scaling multiplies a row's losses: the probability of its target. 1 without token scaling.
template <class T> LIGER_DEVICE float row_token(const LogitRows& a, float negative_log) {
  return a.token_scaling ? exp_as<T>(-negative_log) : 1.f;
}

// Computes and stores a row's results except moments; one thread of the row calls it. weighted: sum of w[j] * (x'[j] - x'[target]), for
// label smoothing; best: the argmax, for predictions; negative_log = lse - x'[target].
template <class T, bool Full, bool LogProbs>
LIGER_DEVICE void write_losses(const LogitRows& a, const RowOutputs& out, const LogitRow<T, Full, LogProbs>& row, float weighted,
                               int64_t best, const LogSumExp& lse, float negative_log) {
  if (!row.valid) {
    const float value = row.ignored ? 0.f : not_a_number();
    return out.write(row, value, value, value, value, -1);
  }
  float ce = a.hard_share * row.target_weight * negative_log;
  if (a.class_share != 0) ce += a.class_share * (a.counts[CrossEntropyCounts::weight] * negative_log - weighted);
  float z = a.lse_square_scale != 0 ? a.lse_square_scale * lse.high * lse.high : 0.f;
  if (a.token_scaling) {
    const float token = exp_as<T>(-negative_log);
    ce *= token;
    z *= token;
  }
  out.write(row, ce, z, lse.high, lse.low, best);
}

template <class Op> const void* temperature_data(const Op& op) {
  if constexpr (requires { op.temperature; }) return op.temperature;
  else return nullptr;
}

// classes: the number of classes of the whole vocabulary.
template <class Op> LogitRows logit_rows(const Op& op, int64_t classes, const launch::LaunchPlan& plan, Stream stream) {
  const CrossEntropyOptions& o = op.options;
  require(classes <= int64_t{1} << 30, op.op, ": vocab_size is ", classes,
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
          float(o.label_smoothing / double(classes)),
          float(o.lse_square_scale),
          float(o.softcap),
          o.softcap == 0 ? 0.f : float(o.logit_scale / o.softcap),
          static_cast<const float*>(temperature_data(op)),
          float(o.logit_scale),
          o.token_scaling,
          false,
          plan.threads_per_row,
          target_report(op.op, stream.device)};
}

inline RowOutputs row_outputs(const CrossEntropyRows& op) {
  return {static_cast<float*>(op.ce),
          static_cast<float*>(op.z),
          static_cast<float*>(op.lse),
          static_cast<float*>(op.accuracy),
          op.predicted,
          op.rows,
          static_cast<float*>(op.entropy),
          static_cast<float*>(op.mean),
          static_cast<float*>(op.log_sum_sq)};
}

template <class T, bool Full> constexpr bool logits_fit(const launch::Instance& instance) {
  return fits<T>(instance) && launch::compiled_for_options(Full, instance);
}
// Calls f.operator()<T, Full, I>() with the type of the logits and the kernel instance of the launch.
template <const launch::Kernel& KernelTable, class F> void with_logits(const launch::Launch& config, Dtype dtype, bool full, F f) {
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    if (full || config.instance.vec == 1)
      with_instance<KernelTable, logits_fit<T, true>>(config, [&]<Instance I>() { f.template operator()<T, true, I>(); });
    else with_instance<KernelTable, logits_fit<T, false>>(config, [&]<Instance I>() { f.template operator()<T, false, I>(); });
  });
}

}  // namespace liger::gpu
