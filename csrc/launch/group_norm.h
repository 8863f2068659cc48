// The launches of GroupNorm. A row is a group of one sample: `cols` elements, of channels of `channel` elements each; a sample has `groups`
// rows. `vec`: elements of an access, 1 where 16 bytes are not aligned.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

struct GroupNormRows {
  int64_t rows, cols, groups, channel;
};

// Vectors that a thread has in registers, at most, of each tensor; of single elements: 4, always. Eight are too many for 1,024 threads.
constexpr int group_norm_k = 8, group_norm_backward_k = 4;
constexpr int group_norm_k_threads = 512;
// Of rows that are read twice: vectors in flight, of each tensor, and blocks of 256 threads on a multiprocessor.
constexpr int group_norm_part_k = 4, group_norm_part_blocks = 3;

inline constexpr Kernel group_norm_registers("GroupNormRegisters", Instance{row_threads, 1, 4}, Instance{row_threads, wide, 2},
                                             Instance{row_threads, wide, 4}, Instance{group_norm_k_threads, wide, 8});
inline constexpr Kernel group_norm_moments("GroupNormMoments", Instance{piece_threads, 1}, Instance{piece_threads, wide});
inline constexpr Kernel group_norm_apply("GroupNormApply", Instance{piece_threads, 1}, Instance{piece_threads, wide});
inline constexpr Kernel group_norm_backward_registers("GroupNormBackwardRegisters", Instance{row_threads, 1, 4},
                                                      Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4});
inline constexpr Kernel group_norm_backward_sums("GroupNormBackwardSums", Instance{piece_threads, 1}, Instance{piece_threads, wide});
inline constexpr Kernel group_norm_backward_apply("GroupNormBackwardApply", Instance{piece_threads, 1}, Instance{piece_threads, wide});

// A long row as parts of `part` elements, a block's each: a row is cut into spans, these into parts. The last ones are shorter.
struct RowParts {
  int64_t span = 1, part = 1;
  int64_t per_span = 1, per_row = 1;
};

// One launch where a block, or a cluster, holds a row; else two, of which the second one reads the row again.
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
