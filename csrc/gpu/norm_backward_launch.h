// The launches of the norms' backward: the path that fits a call (norm_backward.h, norm_backward_rows.h), then the sums.
#pragma once
#include "gpu/column_sum.h"
#include "gpu/norm_backward.h"
#include "gpu/norm_backward_rows.h"

namespace liger::gpu {

// Elements of an access: 16 bytes of z's type; where dtypes are mixed, what serves all of them; 1 where rows are not aligned.
inline int norm_backward_vec(const NormBackwardArgs& a) {
  const bool wide =
      aligned(a.dy, a.cols) && aligned(a.dsum, a.cols) && aligned(a.z, a.cols) && aligned(a.dz, a.cols) && aligned(a.weight, a.cols);
  const bool any_f32 = a.z.dtype == Dtype::f32 || a.dy.dtype == Dtype::f32 || (a.dsum.data && a.dsum.dtype == Dtype::f32);
  const int vec = any_f32 ? 4 : 8;
  return wide && a.cols % vec == 0 ? vec : 1;
}
inline bool norm_backward_mixed(const NormBackwardArgs& a) { return a.dy.dtype != a.z.dtype || (a.dsum.data && a.dsum.dtype != a.z.dtype); }

// The workspace: row_means, and behind them the partial sums, if a parameter's gradient is wanted, for whichever alignment the call will
// have.
inline int64_t row_means_floats(int64_t rows) { return launch::round_up(2 * rows, 4); }
inline int64_t norm_backward_workspace(int64_t rows, int64_t cols, bool centered, bool parameters, Stream stream) {
  int64_t floats = row_means_floats(rows);
  if (parameters) floats += launch::norm_partial_rows(device_profile(stream.device), rows, cols, centered) * cols * (centered ? 2 : 1);
  return floats * int64_t{sizeof(float)};
}

template <bool Centered> void norm_backward(NormBackwardArgs a, void* workspace, Stream stream) {
  const launch::DeviceProfile& device = device_profile(stream.device);
  a.row_means = static_cast<float*>(workspace);
  const bool parameters = a.dweight.data || a.dbias.data;
  if (parameters) a.partial = a.row_means + row_means_floats(a.rows);
  const bool frozen = !parameters && a.weight.data && a.weight.dtype == a.z.dtype;
  a.inverse_cols = 1.0f / float(a.cols);
  const int vec = norm_backward_vec(a);
  const launch::Tunable kernel = Centered      ? launch::Tunable::layer_norm_backward
                                 : a.dsum.data ? launch::Tunable::add_rms_norm_backward
                                               : launch::Tunable::rms_norm_backward;
  const launch::NormBackwardPlans plans = launch::plan_norm_backward_paths(
      device, a.rows, a.cols, vec, {.centered = Centered, .mixed = norm_backward_mixed(a), .frozen = frozen, .inputs = a.dsum.data ? 3 : 2},
      launch::knobs_of(device, kernel, vec, a.rows, a.cols));
  if (plans.rows) {
    a.threads_per_row = plans.rows->threads_per_row;
    return dispatch(a.z.dtype, [&](auto tag) {
      using T = std::remove_cvref_t<decltype(tag)>;
      constexpr int wide = 16 / int(sizeof(T));
      if (plans.rows->k == 2) launch<NormBackwardRows<T, wide, 2, Centered>>(*plans.rows, a, stream);
      else launch<NormBackwardRows<T, wide, 4, Centered>>(*plans.rows, a, stream);
    });
  }
  const launch::LaunchPlan& plan = plans.sums;
  if (plan.path == launch::Path::regs) {
    a.threads_per_row = plan.threads_per_row;
    a.stages = plan.stages;
    a.ring_offset = plan.ring_offset;
    dispatch(a.z.dtype, [&](auto tag) {
      using T = std::remove_cvref_t<decltype(tag)>;
      constexpr int wide = 16 / int(sizeof(T));
      if (vec == 1) return launch<NormBackwardRegisters<T, 1, 4, 0, Centered>>(plan, a, stream);
      const auto start = [&](auto k) {
        if (plan.threads_per_row < 256) launch<NormBackwardRegisters<T, wide, decltype(k)::value, 0, Centered>>(plan, a, stream);
        else launch<NormBackwardRegisters<T, wide, decltype(k)::value, 256, Centered>>(plan, a, stream);
      };
      if constexpr (may_have_clusters && !Centered)
        if (plan.k == 3) return start(std::integral_constant<int, 3>{});
      if (plan.threads_per_row <= 256) return start(std::integral_constant<int, 2>{});
      if constexpr (!Centered)
        if (plan.block > 512) return launch<NormBackwardRegisters<T, wide, 2, 1024, Centered>>(plan, a, stream);
      launch<NormBackwardRegisters<T, wide, 2, 512, Centered>>(plan, a, stream);
    });
  } else {
    a.rows_per_block = launch::ceil_div(a.rows, plan.partial_rows);
    const auto start = [&](auto constant) {
      constexpr int VEC = decltype(constant)::value;
      if (a.dz.data) launch<NormBackwardMeans<VEC, Centered>>(plans.means, a, stream);
      launch<NormBackwardTiles<VEC, Centered>>(plan, a, stream);
    };
    if (vec == 8) start(std::integral_constant<int, 8>{});
    else if (vec == 4) start(std::integral_constant<int, 4>{});
    else start(std::integral_constant<int, 1>{});
  }
  const PartialSums sums{a.partial, plan.partial_rows, Centered ? 2 * a.cols : a.cols};
  sum_columns(sums, {{0, a.cols, a.dweight}, {a.cols, Centered ? a.cols : 0, a.dbias}}, stream);
}

}  // namespace liger::gpu
