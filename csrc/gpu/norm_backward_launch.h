// Launches the norms' backward: the kernels that fit the call (norm_backward.h, or norm_backward_few.h, _rows.h or _two_pass.h), then the
// sum of the partial rows, if there are any.
#pragma once
#include "gpu/column_sum.h"
#include "gpu/norm_backward.h"
#include "gpu/norm_backward_few.h"
#include "gpu/norm_backward_rows.h"
#include "gpu/norm_backward_two_pass.h"

namespace liger::gpu {

// Returns the elements per access: 8 for 16-bit tensors, 4 if dy, z or dsum is fp32, 1 where rows are not aligned.
inline int norm_backward_vec(const NormBackwardArgs& a) {
  const bool wide =
      aligned(a.dy, a.cols) && aligned(a.dsum, a.cols) && aligned(a.z, a.cols) && aligned(a.dz, a.cols) && aligned(a.weight, a.cols);
  const bool any_f32 = a.z.dtype == Dtype::f32 || a.dy.dtype == Dtype::f32 || (a.dsum.data && a.dsum.dtype == Dtype::f32);
  const int vec = any_f32 ? 4 : 8;
  return wide && a.cols % vec == 0 ? vec : 1;
}
inline bool norm_backward_mixed(const NormBackwardArgs& a) { return a.dy.dtype != a.z.dtype || (a.dsum.data && a.dsum.dtype != a.z.dtype); }

// The workspace: row_means and, if dweight or dbias is computed, the partial rows behind them. The size is enough for any alignment of the
// tensors.
inline int64_t row_means_floats(int64_t rows) { return launch::round_up(2 * rows, 4); }
template <bool Centered> int64_t norm_backward_workspace(const NormBackward<Centered>& a, Stream stream) {
  int64_t floats = row_means_floats(a.rows);
  if (a.dweight.data || a.dbias.data)
    floats += launch::norm_partial_rows(device_profile(stream.device), a.rows, a.cols, Centered) * a.cols * (Centered ? 2 : 1);
  return floats * int64_t{sizeof(float)};
}

template <bool Centered> void norm_backward(const NormBackward<Centered>& op, Stream stream) {
  NormBackwardArgs a{op.rows,
                     op.cols,
                     op.dy,
                     op.dsum,
                     op.z,
                     op.weight,
                     static_cast<const float*>(op.mean),
                     static_cast<const float*>(op.rstd),
                     op.dz,
                     op.dweight,
                     op.dbias,
                     float(op.offset)};
  a.row_means = static_cast<float*>(op.workspace);
  const bool parameters = a.dweight.data || a.dbias.data;
  if (parameters) a.partial = a.row_means + row_means_floats(a.rows);
  const bool frozen = !parameters && a.weight.data && a.weight.dtype == a.z.dtype;
  a.inverse_cols = 1.0f / float(a.cols);
  const launch::NormBackwardLaunches config =
      launch::norm_backward(device_profile(stream.device), a.rows, a.cols, norm_backward_vec(a),
                            {.centered = Centered, .mixed = norm_backward_mixed(a), .frozen = frozen, .inputs = a.dsum.data ? 3 : 2});
  const launch::Launch& main = config.main;
  const launch::LaunchPlan& plan = main.plan;
  if (main.is(launch::norm_backward_tiles)) {
    a.rows_per_block = launch::ceil_div(a.rows, plan.partial_rows);
    if (a.dz.data)
      with_instance<launch::norm_backward_means>(
          config.means, [&]<Instance I>() { launch<NormBackwardMeans<I.vec, Centered>>(config.means, a, stream); });
    with_instance<launch::norm_backward_tiles>(main, [&]<Instance I>() { launch<NormBackwardTiles<I.vec, Centered>>(main, a, stream); });
  } else {
    a.threads_per_row = plan.threads_per_row;
    if (main.is(launch::norm_backward_few)) a.tile_blocks = launch::few_tiles(a.cols, main.instance);
    a.stages = plan.stages;
    a.ring_offset = plan.shared_offset;
    a.row_step = int64_t{plan.grid / plan.cluster} * std::max(1, plan.block / plan.threads_per_row);
    dispatch(a.z.dtype, [&](auto tag) {
      using T = decltype(tag);
      if (main.is(launch::norm_backward_few))
        with_instance<launch::norm_backward_few, fits<T>>(
            main, [&]<Instance I>() { launch<NormBackwardFew<T, I.vec, I.k, I.threads, Centered>>(main, a, stream); });
      else if (main.is(launch::norm_backward_rows))
        with_instance<launch::norm_backward_rows, fits<T>>(
            main, [&]<Instance I>() { launch<NormBackwardRows<T, I.vec, I.k, Centered>>(main, a, stream); });
      else
        with_instance<launch::norm_backward_registers, fits<T>>(main, [&]<Instance I>() {
          if (a.dsum.data == nullptr) launch<NormBackwardRegisters<T, I.vec, I.k, I.threads, Centered, false>>(main, a, stream);
          else if constexpr (!Centered) launch<NormBackwardRegisters<T, I.vec, I.k, I.threads, false, true>>(main, a, stream);
        });
    });
  }
  if (plan.partial_rows == 0) return;
  const PartialSums sums{a.partial, plan.partial_rows, Centered ? 2 * a.cols : a.cols};
  sum_columns(sums, {{0, a.cols, a.dweight}, {a.cols, Centered ? a.cols : 0, a.dbias}}, stream);
}

}  // namespace liger::gpu
