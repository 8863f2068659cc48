// The launches of the gated linear units.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int glu_k = 2;  // vectors that a thread has in flight

inline constexpr Kernel glu_forward("GluForwardKernel", Instance{piece_threads, 1}, Instance{piece_threads, wide});
inline constexpr Kernel glu_backward("GluBackwardKernel", Instance{piece_threads, 1}, Instance{piece_threads, wide});

// `kernel` is one of them. `vec`: elements of an access, 1 where 16 bytes are not aligned. `contiguous`: there are no gaps between rows,
// which are one long row then.
Launch glu(const DeviceProfile&, const Kernel& kernel, Tunable, int64_t rows, int64_t cols, int vec, bool contiguous,
           const Knobs* = nullptr);

}  // namespace liger::launch
