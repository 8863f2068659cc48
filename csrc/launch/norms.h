// The launches of RMSNorm, add+RMSNorm and LayerNorm. `vec`: elements of an access, 1 where 16 bytes are not aligned.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

// Floats of shared memory for sums of up to two values over rows of whole warps (RowWarps in gpu/row_warps.h): two buffers. In each a row
// of a block has two for each of its warps, rounded up to eight: 64 for the eight rows of two warps of a block of 512 threads.
constexpr int row_warps_floats = 2 * 64;

constexpr int whole_warps = 1;  // an instance's `threads`: a row has any number of whole warps

// The forward.
struct NormForwardKind {
  bool centered;    // LayerNorm, which has a mean; else RMSNorm or add+RMSNorm
  bool residual;    // two tensors are read, x and a residual
  bool same_dtype;  // the weight, and LayerNorm's bias, are there and have the result's dtype. They get faster kernels
};
constexpr int norm_forward_k(int vec) { return vec == 1 ? 4 : 8; }  // the most vectors that a thread has in registers
// Rows of a cluster: how many of its blocks a multiprocessor should hold. Four of LayerNorm, which loads weight and bias late; three of
// RMSNorm, whose threads hold the weights in registers, too; two if two tensors are read, which a kernel for parameters of any dtype may
// always do.
constexpr int cluster_blocks(NormForwardKind kind) { return kind.centered ? 4 : kind.residual || !kind.same_dtype ? 2 : 3; }

// 16-bit rows of RMSNorm whose vectors are far from a power of two: whole warps, with three vectors per thread, in blocks of a row each. A
// multiprocessor should hold five blocks of the largest size: 48 registers are enough for a thread.
constexpr int forward_warps_k = 3, forward_warps_bound = 256, forward_warps_blocks = 5;
// 16-bit rows of RMSNorm of two vectors for each of eight threads, whose number the compiler knows: heads of queries and keys, of 128
// columns. Three blocks of 512 threads: 40 registers.
constexpr int forward_lanes = 8, forward_lanes_k = 2, forward_lanes_bound = 512, forward_lanes_blocks = 3;

// threads: the most threads of a block, which in clusters is cluster_block; or whole_warps, or forward_lanes.
inline constexpr Kernel norm_forward_registers("NormForwardRegisters", Instance{row_threads, 1, 4, row_threads},
                                               Instance{row_threads, wide, 1, row_threads}, Instance{row_threads, wide, 2, row_threads},
                                               Instance{row_threads, wide, 4, row_threads}, Instance{row_threads, wide, 8, row_threads},
                                               Instance{forward_warps_bound, 8, forward_warps_k, whole_warps},
                                               Instance{forward_lanes_bound, 8, forward_lanes_k, forward_lanes},
                                               Instance{cluster_block, wide, 8, cluster_block, true});
inline constexpr Kernel norm_forward_reread("NormForwardReread", Instance{row_threads, 1}, Instance{row_threads, wide});
// Is this instance compiled for this kind?
constexpr bool norm_forward_has(NormForwardKind kind, const Instance& of) {
  if (of.threads == whole_warps || of.threads == forward_lanes) return !kind.centered && !kind.residual && kind.same_dtype;
  return of.vec > 1 || !kind.same_dtype;
}

Launch norm_forward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, NormForwardKind, const Knobs* = nullptr);

// The backward.
struct NormBackwardKind {
  bool centered, mixed;  // centered: LayerNorm; mixed: dy, dsum and z do not all have one dtype
  bool frozen;  // no parameter wants a gradient, and the weight is of z's type
  int inputs;  // how many tensors are read: dy, z and perhaps dsum
};

// Persistent blocks, whose registers hold sums over rows for their columns: one set (dweight), or two if centered (LayerNorm: dbias). Each
// block, or cluster, writes one partial row.
LaunchPlan plan_norm_backward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, bool centered, const Knobs& = {});
inline constexpr Kernel norm_backward_rows("NormBackwardRows", Instance{512, wide, 2}, Instance{512, wide, 4});
// threads: of a row of a tile of columns, with a vector each. Four: 64 bytes, two sectors. Eight: half as many tiles.
inline constexpr Kernel norm_backward_few("NormBackwardFew", Instance{512, wide, 2, 4}, Instance{512, wide, 2, 8},
                                          Instance{512, wide, 4, 4});
constexpr int64_t few_tiles(int64_t cols, const Instance& of) { return ceil_div(cols, of.threads * of.vec); }
// threads: of a row in a block, as far as the compiler knows them. 0: a part of a warp, or single elements; whole_warps: any number of
// warps; 512: blocks of a cluster, or where there are none, blocks of long rows with four vectors per thread.
inline constexpr Kernel norm_backward_registers("NormBackwardRegisters", Instance{512, 1, 4, 0}, Instance{512, wide, 2, 0},
                                                Instance{512, wide, 2, whole_warps}, Instance{512, wide, 3, whole_warps, true},
                                                Instance{512, wide, 2, 512}, Instance{512, wide, 4, 512});
// Does this instance read each row twice from its ring in shared memory, where asynchronous copies bring the rows? LayerNorm's two sums for
// each of 32 columns take so many registers that they do not hold the row, too.
constexpr bool norm_backward_reads_twice(bool centered, int vec, int k) { return centered && vec == 8 && k == 4; }
inline constexpr Kernel norm_backward_means("NormBackwardMeans", Instance{row_threads, 1}, Instance{row_threads, wide});
inline constexpr Kernel norm_backward_tiles("NormBackwardTiles", Instance{independent_threads, 1}, Instance{independent_threads, wide});

struct NormBackwardLaunches {
  Launch means;  // NormBackwardMeans, which runs before NormBackwardTiles if dz is wanted
  Launch main;   // NormBackwardRows, NormBackwardFew or NormBackwardRegisters; NormBackwardTiles if plan.path is reread
};
NormBackwardLaunches norm_backward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, NormBackwardKind, const Knobs* = nullptr);
// An upper bound of the partial rows that either path writes, at any alignment and with any knobs.
int64_t norm_partial_rows(const DeviceProfile&, int64_t rows, int64_t cols, bool centered);

}  // namespace liger::launch
