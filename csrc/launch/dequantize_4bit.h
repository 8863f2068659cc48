// Lists the kernel instances that decode 4-bit weights, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "kernels/dequantize_4bit.h"
#include "launch/launch.h"

namespace liger::launch {

// Vectors of `vec` elements that a thread writes. dequantize_4bit_lanes neighbouring threads write 64 values: a usual block, with one
// scale.
constexpr int dequantize_4bit_k(int vec) { return vec == 1 ? 4 : 16 / vec; }
constexpr int dequantize_4bit_lanes = 4;

inline constexpr Kernel dequantize_4bit_kernel("Dequantize4bitKernel", Instance{independent_threads, 1},
                                               Instance{independent_threads, wide});

Launch op_launch(const DeviceProfile&, const Dequantize4bit&);

}  // namespace liger::launch
