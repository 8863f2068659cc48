// GroupNorm's launches. A row is a group of one sample; the kernels are in group_norm_forward.h and group_norm_backward.h.
#include "kernels/group_norm.h"

#include "gpu/column_sum.h"
#include "gpu/group_norm_backward.h"
#include "gpu/group_norm_forward.h"

namespace liger::gpu {
namespace {

launch::GroupNormRows launch_rows(const GroupNormShape& shape) { return {shape.rows(), shape.cols(), shape.groups, shape.channel}; }

// Elements per access. In the forward a vector may lie in two channels, but not in three; in the backward it lies in one.
int forward_vec(const GroupNormForward& a) {
  const int vec = 16 / int(dtype_bytes(a.x.dtype));
  const int64_t cols = a.shape.cols(), channel = a.shape.channel;
  return aligned(a.x, cols) && aligned(a.y, cols) && (channel % vec == 0 || channel > vec) ? vec : 1;
}
int backward_vec(const GroupNormBackward& a) {
  const int vec = 16 / int(dtype_bytes(a.x.dtype));
  const int64_t cols = a.shape.cols();
  return aligned(a.dy, cols) && aligned(a.x, cols) && aligned(a.dx, cols) && a.shape.channel % vec == 0 ? vec : 1;
}

launch::GroupNormLaunches launches(const GroupNormForward& a, Stream stream) {
  return launch::group_norm(device_profile(stream.device), launch_rows(a.shape), forward_vec(a));
}
launch::GroupNormLaunches launches(const GroupNormBackward& a, Stream stream) {
  return launch::group_norm_backward(device_profile(stream.device), launch_rows(a.shape), backward_vec(a), a.dweight.data || a.dbias.data);
}

// Returns the floats of the workspace for parts of rows: two for each part, or none if rows are not cut into parts.
int64_t part_floats(const launch::GroupNormLaunches& config) {
  return config.apply.kernel ? launch::round_up(2 * config.main.rows * config.parts.per_row, 4) : 0;
}

}  // namespace

int64_t group_norm_forward_workspace(const GroupNormForward& a, Stream stream) {
  return part_floats(launches(a, stream)) * int64_t{sizeof(float)};
}

void group_norm_forward(const GroupNormForward& a, Stream stream) {
  const launch::GroupNormLaunches config = launches(a, stream);
  const launch::LaunchPlan& plan = config.main.plan;
  const GroupNormForwardArgs args{.rows = a.shape.rows(),
                                  .shape = GroupNormRow(launch_rows(a.shape)),
                                  .x = a.x.data,
                                  .y = a.y.data,
                                  .weight = a.weight,
                                  .bias = a.bias,
                                  .mean = static_cast<float*>(a.mean),
                                  .rstd = static_cast<float*>(a.rstd),
                                  .eps = float(a.eps),
                                  .partial = static_cast<float*>(a.workspace),
                                  .parts = config.parts,
                                  .threads_per_row = plan.threads_per_row,
                                  .shared_offset = plan.shared_offset};
  dispatch(a.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (config.main.is(launch::group_norm_registers))
      return with_instance<launch::group_norm_registers, fits<T>>(
          config.main, [&]<Instance I>() { launch<GroupNormRegisters<T, I.vec, I.k>>(config.main, args, stream); });
    if (config.main.is(launch::group_norm_held))
      return with_instance<launch::group_norm_held, fits<T>>(
          config.main, [&]<Instance I>() { launch<GroupNormHeld<T, I.vec, I.k>>(config.main, args, stream); });
    with_instance<launch::group_norm_moments, fits<T>>(
        config.main, [&]<Instance I>() { launch<GroupNormMoments<T, I.vec>>(config.main, args, stream); });
    with_instance<launch::group_norm_apply, fits<T>>(config.apply,
                                                     [&]<Instance I>() { launch<GroupNormApply<T, I.vec>>(config.apply, args, stream); });
  });
}

int64_t group_norm_backward_workspace(const GroupNormBackward& a, Stream stream) {
  const launch::GroupNormLaunches config = launches(a, stream);
  const bool parameters = a.dweight.data || a.dbias.data;
  return (part_floats(config) + (parameters ? config.partial_rows * 2 * a.shape.all_channels() : 0)) * int64_t{sizeof(float)};
}

void group_norm_backward(const GroupNormBackward& a, Stream stream) {
  const launch::GroupNormLaunches config = launches(a, stream);
  const launch::LaunchPlan& plan = config.main.plan;
  float* const row_sums = static_cast<float*>(a.workspace);
  float* const partial = a.dweight.data || a.dbias.data ? row_sums + part_floats(config) : nullptr;
  const GroupNormBackwardArgs args{.rows = a.shape.rows(),
                                   .shape = GroupNormRow(launch_rows(a.shape)),
                                   .dy = a.dy.data,
                                   .x = a.x.data,
                                   .dx = a.dx.data,
                                   .weight = a.weight,
                                   .mean = static_cast<const float*>(a.mean),
                                   .rstd = static_cast<const float*>(a.rstd),
                                   .row_sums = row_sums,
                                   .partial = partial,
                                   .parts = config.parts,
                                   .threads_per_row = plan.threads_per_row,
                                   .shared_offset = plan.shared_offset};
  dispatch(a.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (config.main.is(launch::group_norm_backward_registers))
      return with_instance<launch::group_norm_backward_registers, fits<T>>(
          config.main, [&]<Instance I>() { launch<GroupNormBackwardRegisters<T, I.vec, I.k>>(config.main, args, stream); });
    if (config.main.is(launch::group_norm_backward_held))
      return with_instance<launch::group_norm_backward_held, fits<T>>(
          config.main, [&]<Instance I>() { launch<GroupNormBackwardHeld<T, I.vec, I.k>>(config.main, args, stream); });
    with_instance<launch::group_norm_backward_sums, fits<T>>(
        config.main, [&]<Instance I>() { launch<GroupNormBackwardSums<T, I.vec>>(config.main, args, stream); });
    if (a.dx.data)
      with_instance<launch::group_norm_backward_apply, fits<T>>(
          config.apply, [&]<Instance I>() { launch<GroupNormBackwardApply<T, I.vec>>(config.apply, args, stream); });
  });
  if (partial == nullptr) return;
  const int64_t channels = a.shape.all_channels();
  sum_columns({partial, config.partial_rows, 2 * channels}, {{0, channels, a.dweight}, {channels, channels, a.dbias}}, stream);
}

}  // namespace liger::gpu
