// Lists the kernel instances of squared ReLU, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "kernels/relu_squared.h"
#include "launch/launch.h"

namespace liger::launch {

constexpr int relu_squared_k = 4;  // vectors of each tensor that a thread loads before it uses the first one

inline constexpr Kernel relu_squared_forward("ReluSquaredForwardKernel", Instance{independent_threads, 1},
                                             Instance{independent_threads, wide});
inline constexpr Kernel relu_squared_backward("ReluSquaredBackwardKernel", Instance{independent_threads, 1},
                                              Instance{independent_threads, wide});

Launch op_launch(const DeviceProfile&, const ReluSquaredForward&, const Knobs* = nullptr);
Launch op_launch(const DeviceProfile&, const ReluSquaredBackward&, const Knobs* = nullptr);

}  // namespace liger::launch
