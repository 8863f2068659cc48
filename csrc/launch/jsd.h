// Lists the kernel instances of the generalised Jensen-Shannon divergence, and plans their launches, which csrc/gpu executes (launch.h).
// The forward's kernel stores one divergence per row. A second kernel, SumLosses, computes their mean: sum_losses() in
// launch/cross_entropy.h returns its launch.
#pragma once
#include "kernels/jsd.h"
#include "launch/launch.h"

namespace liger::launch {

// The number of vectors of each of the two inputs that a thread loads before it uses the first one: jsd_in_flight in the kernel over rows,
// jsd_tile_k in the backward's tiles.
constexpr int jsd_in_flight = 2, jsd_tile_k = 2;

inline constexpr Kernel jsd_forward_kernel("JsdForwardKernel", Instance{512, 1}, Instance{512, wide});
inline constexpr Kernel jsd_backward_kernel("JsdBackwardKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});

Launch op_launch(const DeviceProfile&, const JsdForward&, const Knobs* = nullptr);
Launch op_launch(const DeviceProfile&, const JsdBackward&, const Knobs* = nullptr);

}  // namespace liger::launch
