// Lists the kernel instances of the gated activations SwiGLU and GeGLU, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int glu_k = 2;  // vectors of each tensor that a thread loads before it uses the first one

inline constexpr Kernel glu_forward("GluForwardKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});
inline constexpr Kernel glu_backward("GluBackwardKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});

// kernel: one of the two above. silu: true for SwiGLU, false for GeGLU. TiledRows (elementwise.h) explains the other arguments.
Launch glu(const DeviceProfile&, const Kernel& kernel, bool silu, int64_t rows, int64_t cols, int vec, bool contiguous,
           const Knobs* = nullptr);

}  // namespace liger::launch
