// Launches the norms' backward: the kernels that fit the call (norm_backward.h, or norm_backward_few.h, _rows.h or _two_pass.h), then the
// sum of the partial rows, if there are any.
#pragma once
#include "gpu/column_sum.h"
#include "gpu/norm_backward.h"
#include "gpu/norm_backward_few.h"
#include "gpu/norm_backward_rows.h"
#include "gpu/norm_backward_two_pass.h"

namespace liger::gpu {

template <bool Centered> int64_t norm_backward_workspace(const NormBackward<Centered>& op, Stream stream) {
  return launch::workspace_bytes(device_profile(stream.device), op);
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
  if (a.dweight.data || a.dbias.data) a.partial = a.row_means + launch::row_means_floats(a.rows);
  a.inverse_cols = 1.0f / float(a.cols);
  for (const launch::Launch& config : launch::op_launches(device_profile(stream.device), op)) {
    const launch::LaunchPlan& plan = config.plan;
    if (config.is(launch::sum_columns_kernel)) {
      sum_columns(config, {a.partial, config.rows, Centered ? 2 * a.cols : a.cols}, {{0, a.cols, a.dweight}, {a.cols, a.cols, a.dbias}},
                  stream);
      continue;
    }
    a.threads_per_row = plan.threads_per_row;
    if (config.is(launch::norm_backward_few)) a.tile_blocks = launch::few_tiles(a.cols, config.instance);
    if (config.is(launch::norm_backward_tiles)) a.rows_per_block = launch::ceil_div(a.rows, plan.partial_rows);
    a.stages = plan.stages;
    a.ring_offset = plan.shared_offset;
    a.row_step = int64_t{plan.grid / plan.cluster} * std::max(1, plan.block / plan.threads_per_row);
    dispatch(a.z.dtype, [&](auto tag) {
      using T = decltype(tag);
      if (config.is(launch::norm_backward_means))
        with_instance<launch::norm_backward_means>(config,
                                                   [&]<Instance I>() { launch<NormBackwardMeans<I.vec, Centered>>(config, a, stream); });
      else if (config.is(launch::norm_backward_tiles))
        with_instance<launch::norm_backward_tiles>(config,
                                                   [&]<Instance I>() { launch<NormBackwardTiles<I.vec, Centered>>(config, a, stream); });
      else if (config.is(launch::norm_backward_few))
        with_instance<launch::norm_backward_few, fits<T>>(
            config, [&]<Instance I>() { launch<NormBackwardFew<T, I.vec, I.k, I.row_layout, Centered>>(config, a, stream); });
      else if (config.is(launch::norm_backward_rows))
        with_instance<launch::norm_backward_rows, fits<T>>(
            config, [&]<Instance I>() { launch<NormBackwardRows<T, I.vec, I.k, Centered>>(config, a, stream); });
      else
        with_instance<launch::norm_backward_registers, fits<T>>(config, [&]<Instance I>() {
          if (a.dsum.data == nullptr) launch<NormBackwardRegisters<T, I.vec, I.k, I.row_layout, Centered, false>>(config, a, stream);
          else if constexpr (!Centered) launch<NormBackwardRegisters<T, I.vec, I.k, I.row_layout, false, true>>(config, a, stream);
        });
    });
  }
}

}  // namespace liger::gpu
