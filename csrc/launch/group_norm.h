// Lists the kernel instances of GroupNorm, and plans their launches, which csrc/gpu executes (launch.h). A row is one group of one sample:
// `cols` elements, in channels of `channel` elements each. A sample has `groups` rows. `vec`: elements per access; 1 where 16-byte
// accesses do not fit the rows or channels.
#pragma once
#include "kernels/group_norm.h"
#include "launch/launch.h"

namespace liger::launch {

// The most vectors of each tensor that a thread holds where registers alone hold a row.
constexpr int group_norm_k = 4;
// The most blocks of a cluster that share a channel, where each block has an equal share of the row's vectors. length: vectors of a
// channel.
constexpr int group_norm_sharing(int64_t vectors, int64_t length, int cluster) {
  const int64_t share = ceil_div(vectors, cluster);
  return static_cast<int>(std::min<int64_t>(cluster, ceil_div(length - 1, share) + 1));
}
// The bytes of shared memory for the parameters of the channels of `rows` rows, as floats.
constexpr int64_t channel_table_bytes(int64_t rows, int64_t channels, int parameters) {
  return round_up(rows * channels * parameters * int64_t{sizeof(float)}, 16);
}

// For rows that are read twice: the number of vectors of each tensor that a thread loads before it uses the first one, and the number of
// blocks of 256 threads that a multiprocessor holds.
constexpr int group_norm_part_k = 4, group_norm_part_blocks = 3;

inline constexpr Kernel group_norm_registers("GroupNormRegisters", Instance{row_threads, 1, 4}, Instance{row_threads, wide, 2},
                                             Instance{row_threads, wide, 4});
// Longer rows: a thread holds k vectors of each tensor in registers, and plan.slots in shared memory.
inline constexpr Kernel group_norm_held("GroupNormHeld", Instance{row_threads, wide, 4});
inline constexpr Kernel group_norm_moments("GroupNormMoments", Instance{independent_threads, 1}, Instance{independent_threads, wide});
inline constexpr Kernel group_norm_apply("GroupNormApply", Instance{independent_threads, 1}, Instance{independent_threads, wide});
inline constexpr Kernel group_norm_backward_registers("GroupNormBackwardRegisters", Instance{row_threads, 1, 4},
                                                      Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4});
inline constexpr Kernel group_norm_backward_held("GroupNormBackwardHeld", Instance{row_threads, wide, 2}, Instance{row_threads, wide, 4});
inline constexpr Kernel group_norm_backward_sums("GroupNormBackwardSums", Instance{independent_threads, 1},
                                                 Instance{independent_threads, wide});
inline constexpr Kernel group_norm_backward_apply("GroupNormBackwardApply", Instance{independent_threads, 1},
                                                  Instance{independent_threads, wide});

// The division of a long row: into spans of `span` elements (one or several whole channels; in the forward the whole row), and each span
// into parts of `part` elements. A block processes one part. The last span of a row and the last part of a span may be shorter.
struct RowParts {
  int64_t span = 1, part = 1;
  int64_t per_span = 1, per_row = 1;  // number of parts
};

// GroupNormRegisters or GroupNormHeld, if a block or a cluster holds a row; otherwise GroupNormMoments and GroupNormApply, which reads the
// row again. The backward: likewise, with GroupNormBackwardSums before GroupNormBackwardApply, which runs if dx is requested. SumColumns
// follows if dweight or dbias is requested.
struct GroupNormLaunches : Launches {
  RowParts parts;  // of rows that are read twice
  int64_t part_floats = 0;  // of the workspace: two for each part, if rows are read twice
  int64_t partial_rows = 0;  // backward: rows of partial sums of channels; each sample has one for each block that may share a channel
};
GroupNormLaunches op_launches(const DeviceProfile&, const GroupNormForward&, const Knobs* = nullptr);
GroupNormLaunches op_launches(const DeviceProfile&, const GroupNormBackward&, const Knobs* = nullptr);
int64_t workspace_bytes(const DeviceProfile&, const GroupNormForward&);
int64_t workspace_bytes(const DeviceProfile&, const GroupNormBackward&);

}  // namespace liger::launch
