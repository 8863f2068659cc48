// The launches of squared ReLU.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int relu_squared_k = 4;  // vectors that a thread has in flight, of both inputs of the backward

inline constexpr Kernel relu_squared_forward("ReluSquaredForwardKernel", Instance{piece_threads, 1}, Instance{piece_threads, wide});
inline constexpr Kernel relu_squared_backward("ReluSquaredBackwardKernel", Instance{piece_threads, 1}, Instance{piece_threads, wide});

// `kernel` is one of them. The other arguments as row_tiles (elementwise.h) takes them.
Launch relu_squared(const DeviceProfile&, const Kernel& kernel, int64_t rows, int64_t cols, int vec, bool contiguous,
                    const Knobs* = nullptr);

}  // namespace liger::launch
