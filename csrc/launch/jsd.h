// The launches of the generalised Jensen-Shannon divergence; its rows' mean is launch/cross_entropy.h's sum_losses.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

// Vectors of each of the two inputs that a thread has in flight: of rows, and of the backward's tiles.
constexpr int jsd_in_flight = 2, jsd_tile_k = 2;

inline constexpr Kernel jsd_forward_kernel("JsdForwardKernel", Instance{512, 1}, Instance{512, wide});
inline constexpr Kernel jsd_backward_kernel("JsdBackwardKernel", Instance{piece_threads, 1}, Instance{piece_threads, wide});

// `vec`: elements of an access, 1 where the tensors' rows begin at different places within 16 bytes.
Launch jsd_forward(const DeviceProfile&, int64_t rows, int64_t vocab, int element_bytes, int vec, const Knobs* = nullptr);
Launch jsd_backward(const DeviceProfile&, int64_t rows, int64_t vocab, int vec, const Knobs* = nullptr);

}  // namespace liger::launch
