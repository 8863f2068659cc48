// Lists the kernel instances of the gated activations SwiGLU and GeGLU, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "kernels/glu.h"
#include "launch/launch.h"

namespace liger::launch {

constexpr int glu_k = 2;  // vectors of each tensor that a thread loads before it uses the first one

inline constexpr Kernel glu_forward("GluForwardKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});
inline constexpr Kernel glu_backward("GluBackwardKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});

Launch op_launch(const DeviceProfile&, const GluForward&, const Knobs* = nullptr);
Launch op_launch(const DeviceProfile&, const GluBackward&, const Knobs* = nullptr);

}  // namespace liger::launch
