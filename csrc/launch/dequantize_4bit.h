// Lists the kernel instances that decode 4-bit weights, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int dequantize_4bit_k = 4;  // vectors of the output that a thread writes, and loads of packed values before the first is used

inline constexpr Kernel dequantize_4bit_kernel("Dequantize4bitKernel", Instance{independent_threads, 1},
                                               Instance{independent_threads, wide});

// vec: elements of the output per store.
Launch dequantize_4bit(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

}  // namespace liger::launch
