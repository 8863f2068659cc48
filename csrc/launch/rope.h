// The launches of rotary embeddings.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int rope_heads_in_flight = 2;

inline constexpr Kernel rope_kernel("RopeKernel", Instance{independent_threads, 1}, Instance{independent_threads, wide});
// For whole vectors whose pairs are interleaved before the rotation, after it, or both.
inline constexpr Kernel rope_interleaved_kernel("RopeInterleavedKernel", Instance{independent_threads, wide});

struct RopeShape {
  int64_t positions, q_heads, k_heads, head_dim, rotary_dim;
  bool interleaved;
};
struct RopeLaunch : Launch {  // of `rows` positions
  int lanes = 1, q_slots = 1, k_slots = 1;  // RopePlan's
};
RopePlan plan_rope_heads(const DeviceProfile&, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t head_dim, int64_t rotary_dim,
                         int vec, const Knobs& = {});
// That of the positions behind the first `done`, as many as one launch can have. `vec`: elements of an access, 1 where 16 bytes are not
// aligned.
RopeLaunch rope(const DeviceProfile&, const RopeShape&, int64_t done, int vec, const Knobs* = nullptr);

}  // namespace liger::launch
