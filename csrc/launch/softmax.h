// The launches of softmax.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

// Vectors that a thread has in registers, at most; of single elements: 4, always.
constexpr int softmax_forward_k = 8, softmax_backward_k = 4;

inline constexpr Kernel softmax_registers{"SoftmaxRegisters",
                                          {{row_threads, 1, 4},
                                           {row_threads, 4, 1},
                                           {row_threads, 4, 2},
                                           {row_threads, 4, 4},
                                           {row_threads, 4, 8},
                                           {row_threads, 8, 1},
                                           {row_threads, 8, 2},
                                           {row_threads, 8, 4},
                                           {row_threads, 8, 8}}};
inline constexpr Kernel softmax_reread{"SoftmaxReread", {{row_threads, 1}, {row_threads, 4}, {row_threads, 8}}};
inline constexpr Kernel softmax_backward_registers{"SoftmaxBackwardRegisters",
                                                   {{row_threads, 1, 4},
                                                    {row_threads, 4, 1},
                                                    {row_threads, 4, 2},
                                                    {row_threads, 4, 4},
                                                    {row_threads, 8, 1},
                                                    {row_threads, 8, 2},
                                                    {row_threads, 8, 4}}};
inline constexpr Kernel softmax_backward_reread{"SoftmaxBackwardReread", {{row_threads, 1}, {row_threads, 4}, {row_threads, 8}}};

// `vec`: elements of an access, 1 where 16 bytes are not aligned.
Launch softmax_forward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, const Knobs* = nullptr);
Launch softmax_backward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, const Knobs* = nullptr);

}  // namespace liger::launch
