// Lists the kernel instances of softmax, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "kernels/softmax.h"
#include "launch/launch.h"

namespace liger::launch {

// The most vectors of each input that a thread holds in registers: eight of x, or four of dy and four of y. The instances for clusters
// have exactly this many.
constexpr int softmax_forward_k = 8, softmax_backward_k = 4;

// softmax_registers: rows of whole vectors, or of single elements, that registers hold. softmax_long: rows of any length at any address, in
// registers and shared memory; it reads the part that these cannot hold twice. Likewise for the backward.
inline constexpr Kernel softmax_registers("SoftmaxRegisters", Instance{row_threads, 1, 4}, Instance{row_threads, wide, 1},
                                          Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4}, Instance{row_threads, wide, 8});
inline constexpr Kernel softmax_long("SoftmaxLong", Instance{row_threads, 1, 4}, Instance{row_threads, wide, softmax_forward_k});
inline constexpr Kernel softmax_backward_registers("SoftmaxBackwardRegisters", Instance{row_threads, 1, 4}, Instance{row_threads, wide, 1},
                                                   Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4});
inline constexpr Kernel softmax_backward_long("SoftmaxBackwardLong", Instance{row_threads, 1, 4},
                                              Instance{row_threads, wide, softmax_backward_k});

Launch op_launch(const DeviceProfile&, const SoftmaxForward&, const Knobs* = nullptr);
Launch op_launch(const DeviceProfile&, const SoftmaxBackward&, const Knobs* = nullptr);

}  // namespace liger::launch
