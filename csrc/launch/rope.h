// Lists the kernel instances of rotary embeddings, and plans their launches, which csrc/gpu executes (launch.h).
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int rope_heads_in_flight = 2;  // heads that a thread loads before it uses the first one

inline constexpr Kernel rope_kernel("RopeKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});
// For whole vectors, if pairs are interleaved in the inputs, in the outputs, or in both.
inline constexpr Kernel rope_interleaved_kernel("RopeInterleavedKernel", Instance{independent_threads, wide});

struct RopeShape {
  int64_t positions, q_heads, k_heads, head_dim, rotary_dim;
  bool interleaved;
};
struct RopeLaunch : Launch {  // rows: the number of positions
  int lanes = 1, q_slots = 1, k_slots = 1;  // as in RopePlan
};
// vec: elements per access; 1 where 16-byte accesses do not fit the rows.
RopePlan plan_rope_heads(const DeviceProfile&, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t head_dim, int64_t rotary_dim,
                         int vec, const Knobs& = {});
// The launch for as many of the positions from number `done` on as one launch can process.
RopeLaunch rope(const DeviceProfile&, const RopeShape&, int64_t done, int vec, const Knobs* = nullptr);

}  // namespace liger::launch
