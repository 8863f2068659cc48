// The launches of softmax.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

// The most vectors that a thread has in registers; if vectors are single elements, always 4.
constexpr int softmax_forward_k = 8, softmax_backward_k = 4;

inline constexpr Kernel softmax_registers("SoftmaxRegisters", Instance{row_threads, 1, 4}, Instance{row_threads, wide, 1},
                                          Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4}, Instance{row_threads, wide, 8});
inline constexpr Kernel softmax_reread("SoftmaxReread", Instance{row_threads, 1}, Instance{row_threads, wide});
inline constexpr Kernel softmax_backward_registers("SoftmaxBackwardRegisters", Instance{row_threads, 1, 4}, Instance{row_threads, wide, 1},
                                                   Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4});
inline constexpr Kernel softmax_backward_reread("SoftmaxBackwardReread", Instance{row_threads, 1}, Instance{row_threads, wide});

// `vec`: elements per access; 1 where rows are not aligned to 16 bytes.
Launch softmax_forward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, const Knobs* = nullptr);
Launch softmax_backward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, const Knobs* = nullptr);

}  // namespace liger::launch
