// Lists the kernel instances of RMSNorm, add+RMSNorm and LayerNorm, and plans their launches from the kernels' arguments (launch.h).
// `vec`: elements per access; 1 where 16-byte accesses do not fit the rows.
#pragma once
#include "kernels/norms.h"
#include "launch/launch.h"

namespace liger::launch {

// Floats of shared memory for sums of up to two values over rows of whole warps (RowWarps in gpu/row_warps.h): two buffers of 64. In each
// buffer a row takes two floats per warp, rounded up to eight: 64 floats for a block of 512 threads with eight rows of two warps.
constexpr int row_warps_floats = 2 * 64;

// The forward.
struct NormForwardKind {
  bool centered;    // LayerNorm, which has a mean; else RMSNorm or add+RMSNorm
  bool residual;    // the kernel reads two tensors, x and a residual
  bool same_dtype;  // the weight, and LayerNorm's bias, are present and have the result's dtype. These calls get faster kernels
};
constexpr int norm_forward_k(int vec) { return vec == 1 ? 4 : 8; }  // the most vectors that a thread holds in registers
// The occupancy for rows of a cluster, in blocks per multiprocessor. Four for LayerNorm, which loads weight and bias late; three for
// RMSNorm, whose threads also hold the weights in registers; two for a kernel that reads two tensors. A kernel for parameters of any dtype
// may read a residual, so it also has two.
constexpr int cluster_blocks(NormForwardKind kind) { return kind.centered ? 4 : kind.residual || !kind.same_dtype ? 2 : 3; }

// 16-bit rows of RMSNorm and add+RMSNorm whose number of vectors is far from a power of two: one row per block, of whole warps with three
// vectors per thread. 48 registers are enough for a thread, and 64 with a residual, so that a multiprocessor holds five, or four, blocks of
// the largest size.
constexpr int forward_warps_k = 3, forward_warps_bound = 256;
constexpr int forward_warps_blocks(NormForwardKind kind) { return kind.residual ? 4 : 5; }
// 16-bit rows of RMSNorm with 72 to 128 columns (heads of queries and keys): eight threads with two vectors each, a compile-time constant.
// 40 registers are enough for a thread, so that a multiprocessor holds three blocks of 512 threads.
constexpr int forward_lanes = 8, forward_lanes_k = 2, forward_lanes_bound = 512, forward_lanes_blocks = 3;

// Row layouts: the launch bound, which for clusters is cluster_block; or whole_warps, or forward_lanes.
inline constexpr Kernel norm_forward_registers("NormForwardRegisters", Instance{row_threads, 1, 4, row_threads},
                                               Instance{row_threads, wide, 1, row_threads}, Instance{row_threads, wide, 2, row_threads},
                                               Instance{row_threads, wide, 4, row_threads}, Instance{row_threads, wide, 8, row_threads},
                                               Instance{forward_warps_bound, 8, forward_warps_k, whole_warps},
                                               Instance{forward_lanes_bound, 8, forward_lanes_k, forward_lanes},
                                               Instance{cluster_block, wide, 8, cluster_block, true});
inline constexpr Kernel norm_forward_two_pass("NormForwardTwoPass", Instance{row_threads, 1}, Instance{row_threads, wide});
// Returns whether this instance is compiled for this kind.
constexpr bool norm_forward_has(NormForwardKind kind, const Instance& instance) {
  if (instance.row_layout == whole_warps) return !kind.centered && kind.same_dtype;
  if (instance.row_layout == forward_lanes) return !kind.centered && !kind.residual && kind.same_dtype;
  return instance.vec > 1 || !kind.same_dtype;
}

template <bool Centered> NormForwardKind norm_forward_kind(const NormForward<Centered>&, int vec);
template <bool Centered> Launches op_launches(const DeviceProfile&, const NormForward<Centered>&, const Knobs* = nullptr);

// The backward.
// Persistent blocks whose registers hold sums over rows, for their columns: dweight, and for LayerNorm (centered) dbias. Each block, or
// cluster, writes one partial row.
LaunchPlan plan_norm_backward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, bool centered, const Knobs& = {});
inline constexpr Kernel norm_backward_rows("NormBackwardRows", Instance{512, wide, 2}, Instance{512, wide, 4});
// The threads that read a row of a tile of columns, one vector each, stand in the place of the row layout. Four threads read 64 bytes, two
// sectors; with eight there are half as many tiles.
inline constexpr Kernel norm_backward_few("NormBackwardFew", Instance{512, wide, 2, 4}, Instance{512, wide, 2, 8},
                                          Instance{512, wide, 4, 4});
constexpr int64_t few_tiles(int64_t cols, const Instance& instance) { return ceil_div(cols, instance.row_layout * instance.vec); }
// any_threads: a part of a warp, or rows of single elements; 512: a block of a cluster, or a row of 512 threads in one block.
// overlapped_rows: the same, for a kernel that computes dz of a row behind the sums of the next row.
inline constexpr Kernel norm_backward_registers("NormBackwardRegisters", Instance{512, 1, 4, any_threads},
                                                Instance{512, wide, 2, any_threads}, Instance{512, wide, 2, whole_warps},
                                                Instance{512, wide, 3, whole_warps, true}, Instance{512, wide, 2, 512},
                                                Instance{512, wide, 4, 512}, Instance{512, wide, 2, overlapped_rows, true});
// Returns whether this instance reads each row twice from its pipeline stage in shared memory, where asynchronous copies fetch the rows.
// LayerNorm's two sums for each of a thread's 32 columns leave too few registers to hold the row.
constexpr bool norm_backward_reads_twice(bool centered, int vec, int k) { return centered && vec == 8 && k == 4; }
inline constexpr Kernel norm_backward_means("NormBackwardMeans", Instance{row_threads, 1}, Instance{row_threads, wide});
inline constexpr Kernel norm_backward_tiles("NormBackwardTiles", Instance{independent_threads, 1}, Instance{independent_threads, wide});

// One launch of NormBackwardRows, NormBackwardFew or NormBackwardRegisters, or NormBackwardMeans (if dz is requested) and
// NormBackwardTiles. SumColumns follows kernels that write partial rows.
template <bool Centered> Launches op_launches(const DeviceProfile&, const NormBackward<Centered>&, const Knobs* = nullptr);
// The most partial rows that the backward writes, on either path (Path in plan.h), at any alignment and with any knobs.
int64_t norm_partial_rows(const DeviceProfile&, int64_t rows, int64_t cols, bool centered);
// The workspace of the backward: row_means and, if dweight or dbias is computed, the partial rows behind them. The size is enough for any
// alignment of the tensors.
constexpr int64_t row_means_floats(int64_t rows) { return round_up(2 * rows, 4); }
template <bool Centered> int64_t workspace_bytes(const DeviceProfile& device, const NormBackward<Centered>& op) {
  int64_t floats = row_means_floats(op.rows);
  if (op.dweight.data || op.dbias.data) floats += norm_partial_rows(device, op.rows, op.cols, Centered) * op.cols * (Centered ? 2 : 1);
  return floats * int64_t{sizeof(float)};
}

}  // namespace liger::launch
