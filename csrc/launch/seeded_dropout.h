// Lists the kernel instances of dropout with a seed, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "kernels/seeded_dropout.h"
#include "launch/launch.h"

namespace liger::launch {

constexpr int seeded_dropout_k = 2;  // vectors of each tensor that a thread loads before it uses the first one
constexpr int seeded_dropout_vec = 8;  // elements of a vector of any dtype, which share one call of Philox; 1 where rows are not aligned

inline constexpr Kernel seeded_dropout_kernel("SeededDropoutKernel", Instance{independent_threads, 1},
                                              Instance{independent_threads, seeded_dropout_vec});

Launch op_launch(const DeviceProfile&, const SeededDropout&);

}  // namespace liger::launch
