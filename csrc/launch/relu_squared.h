// Lists the kernel instances of squared ReLU, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int relu_squared_k = 4;  // vectors of each tensor that a thread loads before it uses the first one

inline constexpr Kernel relu_squared_forward("ReluSquaredForwardKernel", Instance{independent_threads, 1},
                                             Instance{independent_threads, wide});
inline constexpr Kernel relu_squared_backward("ReluSquaredBackwardKernel", Instance{independent_threads, 1},
                                              Instance{independent_threads, wide});

// kernel: one of the two above. TiledRows (elementwise.h) explains the other arguments.
Launch relu_squared(const DeviceProfile&, const Kernel& kernel, int64_t rows, int64_t cols, int vec, bool contiguous,
                    const Knobs* = nullptr);

}  // namespace liger::launch
