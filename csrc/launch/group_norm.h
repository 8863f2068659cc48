// The launches of GroupNorm. A row is a group of one sample: `cols` elements, of channels of `channel` elements each; a sample has `groups`
// rows. `vec`: elements of an access, 1 where 16 bytes are not aligned.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

struct GroupNormRows {
  int64_t rows, cols, groups, channel;
};

// The most vectors of each tensor that a thread has in registers; if vectors are single elements, always 4. Eight leave a thread of a block
// of 1,024 too few registers.
constexpr int group_norm_k = 8, group_norm_backward_k = 4;
constexpr int group_norm_k_threads = 512;
// For rows that are read twice: how many vectors of each tensor a thread loads before it uses the first one, and how many blocks of 256
// threads a multiprocessor holds.
constexpr int group_norm_part_k = 4, group_norm_part_blocks = 3;

inline constexpr Kernel group_norm_registers("GroupNormRegisters", Instance{row_threads, 1, 4}, Instance{row_threads, wide, 2},
                                             Instance{row_threads, wide, 4}, Instance{group_norm_k_threads, wide, 8});
inline constexpr Kernel group_norm_moments("GroupNormMoments", Instance{independent_threads, 1}, Instance{independent_threads, wide});
inline constexpr Kernel group_norm_apply("GroupNormApply", Instance{independent_threads, 1}, Instance{independent_threads, wide});
inline constexpr Kernel group_norm_backward_registers("GroupNormBackwardRegisters", Instance{row_threads, 1, 4},
                                                      Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4});
inline constexpr Kernel group_norm_backward_sums("GroupNormBackwardSums", Instance{independent_threads, 1},
                                                 Instance{independent_threads, wide});
inline constexpr Kernel group_norm_backward_apply("GroupNormBackwardApply", Instance{independent_threads, 1},
                                                  Instance{independent_threads, wide});

// How a long row is cut: into spans (whole channels, or parts of one), and these into parts of `part` elements, of which each is processed
// by a block. The last ones are shorter.
struct RowParts {
  int64_t span = 1, part = 1;
  int64_t per_span = 1, per_row = 1;
};

// One launch if a block, or a cluster, holds a row in registers; otherwise two, of which the second one reads the row again.
struct GroupNormLaunches {
  Launch main;  // GroupNormRegisters or GroupNormMoments; GroupNormBackwardRegisters or GroupNormBackwardSums
  Launch apply;  // if main is the second of these
  RowParts parts;  // of both then
  int64_t partial_rows = 0;  // backward: of sums of channels, one for each sample and block that has a part of a channel
};
GroupNormLaunches group_norm(const DeviceProfile&, const GroupNormRows&, int vec, const Knobs* = nullptr);
// parameters: are gradients of weight or bias wanted? A vector lies in one channel.
GroupNormLaunches group_norm_backward(const DeviceProfile&, const GroupNormRows&, int vec, bool parameters, const Knobs* = nullptr);

}  // namespace liger::launch
