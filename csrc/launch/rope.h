// Lists the kernel instances of rotary embeddings, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "kernels/rope.h"
#include "launch/launch.h"

namespace liger::launch {

constexpr int rope_heads_in_flight = 2;  // heads that a thread loads before it uses the first one

inline constexpr Kernel rope_kernel("RopeKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});
// For whole vectors, if pairs are interleaved in the inputs, in the outputs, or in both.
inline constexpr Kernel rope_interleaved_kernel("RopeInterleavedKernel", Instance{independent_threads, wide});

// Each launch processes as many of the remaining positions as one launch can process.
Launches op_launches(const DeviceProfile&, const Rope&, const Knobs* = nullptr);

}  // namespace liger::launch
