// GroupNorm's launches. A row is a group of one sample; the kernels are in group_norm_forward.h and group_norm_backward.h.
#include "kernels/group_norm.h"

#include "gpu/column_sum.h"
#include "gpu/group_norm_backward.h"
#include "gpu/group_norm_forward.h"

namespace liger::gpu {

int64_t group_norm_forward_workspace(const GroupNormForward& a, Stream stream) {
  return launch::workspace_bytes(device_profile(stream.device), a);
}
int64_t group_norm_backward_workspace(const GroupNormBackward& a, Stream stream) {
  return launch::workspace_bytes(device_profile(stream.device), a);
}

void group_norm_forward(const GroupNormForward& a, Stream stream) {
  const launch::GroupNormLaunches launches = launch::op_launches(device_profile(stream.device), a);
  for (const launch::Launch& config : launches) {
    const GroupNormForwardArgs args{.rows = a.shape.rows(),
                                    .shape = GroupNormRow(a.shape),
                                    .x = a.x.data,
                                    .y = a.y.data,
                                    .weight = a.weight,
                                    .bias = a.bias,
                                    .mean = static_cast<float*>(a.mean),
                                    .rstd = static_cast<float*>(a.rstd),
                                    .eps = float(a.eps),
                                    .partial = static_cast<float*>(a.workspace),
                                    .parts = launches.parts,
                                    .threads_per_row = config.plan.threads_per_row,
                                    .shared_offset = config.plan.shared_offset};
    dispatch(a.x.dtype, [&](auto tag) {
      using T = decltype(tag);
      if (config.is(launch::group_norm_registers))
        with_instance<launch::group_norm_registers, fits<T>>(
            config, [&]<Instance I>() { launch<GroupNormRegisters<T, I.vec, I.k>>(config, args, stream); });
      else if (config.is(launch::group_norm_held))
        with_instance<launch::group_norm_held, fits<T>>(config,
                                                        [&]<Instance I>() { launch<GroupNormHeld<T, I.vec, I.k>>(config, args, stream); });
      else if (config.is(launch::group_norm_moments))
        with_instance<launch::group_norm_moments, fits<T>>(config,
                                                           [&]<Instance I>() { launch<GroupNormMoments<T, I.vec>>(config, args, stream); });
      else
        with_instance<launch::group_norm_apply, fits<T>>(config,
                                                         [&]<Instance I>() { launch<GroupNormApply<T, I.vec>>(config, args, stream); });
    });
  }
}

void group_norm_backward(const GroupNormBackward& a, Stream stream) {
  const launch::GroupNormLaunches launches = launch::op_launches(device_profile(stream.device), a);
  float* const row_sums = static_cast<float*>(a.workspace);
  float* const partial = a.dweight.data || a.dbias.data ? row_sums + launches.part_floats : nullptr;
  for (const launch::Launch& config : launches) {
    if (config.is(launch::sum_columns_kernel)) {
      const int64_t channels = a.shape.all_channels();
      sum_columns(config, {partial, config.rows, 2 * channels}, {{0, channels, a.dweight}, {channels, channels, a.dbias}}, stream);
      continue;
    }
    const GroupNormBackwardArgs args{.rows = a.shape.rows(),
                                     .shape = GroupNormRow(a.shape),
                                     .dy = a.dy.data,
                                     .x = a.x.data,
                                     .dx = a.dx.data,
                                     .weight = a.weight,
                                     .mean = static_cast<const float*>(a.mean),
                                     .rstd = static_cast<const float*>(a.rstd),
                                     .row_sums = row_sums,
                                     .partial = partial,
                                     .parts = launches.parts,
                                     .threads_per_row = config.plan.threads_per_row,
                                     .shared_offset = config.plan.shared_offset};
    dispatch(a.x.dtype, [&](auto tag) {
      using T = decltype(tag);
      if (config.is(launch::group_norm_backward_registers))
        with_instance<launch::group_norm_backward_registers, fits<T>>(
            config, [&]<Instance I>() { launch<GroupNormBackwardRegisters<T, I.vec, I.k>>(config, args, stream); });
      else if (config.is(launch::group_norm_backward_held))
        with_instance<launch::group_norm_backward_held, fits<T>>(
            config, [&]<Instance I>() { launch<GroupNormBackwardHeld<T, I.vec, I.k>>(config, args, stream); });
      else if (config.is(launch::group_norm_backward_sums))
        with_instance<launch::group_norm_backward_sums, fits<T>>(
            config, [&]<Instance I>() { launch<GroupNormBackwardSums<T, I.vec>>(config, args, stream); });
      else
        with_instance<launch::group_norm_backward_apply, fits<T>>(
            config, [&]<Instance I>() { launch<GroupNormBackwardApply<T, I.vec>>(config, args, stream); });
    });
  }
}

}  // namespace liger::gpu
