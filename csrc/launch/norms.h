// The launches of RMSNorm, add+RMSNorm and LayerNorm. `vec`: elements of an access, 1 where 16 bytes are not aligned.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

constexpr int cluster_threads = 512;  // the largest blocks of clusters

// The forward.
struct NormForwardKind {
  bool centered;  // LayerNorm
  bool two;       // tensors are read
  bool usual;     // all parameters are there and of the result's type
};
constexpr int norm_forward_k(int vec) { return vec == 1 ? 4 : 8; }  // vectors that a thread has in registers, at most
// Launch bound of the registers path in clusters. It makes room for three blocks of 256 threads, whose registers hold RMSNorm's weights,
// too; of LayerNorm, which loads weights and biases late, for four; of two tensors for two.
constexpr int norm_cluster_bound(NormForwardKind kind) {
  if (kind.centered) return 1000;
  return kind.two || !kind.usual ? cluster_threads : 768;  // kernels for unusual parameters may have two tensors, always
}

inline constexpr Kernel norm_forward_registers("NormForwardRegisters", Instance{row_threads, 1, 4, row_threads},
                                               Instance{row_threads, wide, 1, row_threads}, Instance{row_threads, wide, 2, row_threads},
                                               Instance{row_threads, wide, 4, row_threads}, Instance{row_threads, wide, 8, row_threads},
                                               Instance{cluster_threads, wide, 8, cluster_threads, true}, Instance{768, wide, 8, 768, true},
                                               Instance{1000, wide, 8, 1000, true});
inline constexpr Kernel norm_forward_reread("NormForwardReread", Instance{row_threads, 1}, Instance{row_threads, wide});
// Which of them there are of a kind.
constexpr bool norm_forward_has(NormForwardKind kind, const Instance& of) {
  return (of.vec > 1 || !kind.usual) && (!of.ahead || of.threads == norm_cluster_bound(kind));
}

Launch norm_forward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, NormForwardKind, const Knobs* = nullptr);

// The backward.
struct NormBackwardKind {
  bool centered, mixed;  // mixed: dtypes differ
  bool frozen;  // no parameter wants a gradient, and the weight is of z's type
  int inputs;  // dy, z and perhaps dsum
};

inline constexpr Kernel norm_backward_rows("NormBackwardRows", Instance{512, wide, 2}, Instance{512, wide, 4});
// threads: of a row; 0: as the plan says.
inline constexpr Kernel norm_backward_registers("NormBackwardRegisters", Instance{512, 1, 4, 0}, Instance{512, wide, 2, 0},
                                                Instance{512, wide, 2, 256}, Instance{512, wide, 2, 512}, Instance{1024, wide, 2, 1024},
                                                Instance{512, wide, 3, 0, true}, Instance{512, wide, 3, 256, true});
// A second set of sums leaves no registers for 1,024 threads, nor for a third vector.
constexpr bool norm_backward_has(bool centered, const Instance& of) { return !centered || (of.max_threads <= 512 && !of.ahead); }
inline constexpr Kernel norm_backward_means("NormBackwardMeans", Instance{row_threads, 1}, Instance{row_threads, wide});
inline constexpr Kernel norm_backward_tiles("NormBackwardTiles", Instance{piece_threads, 1}, Instance{piece_threads, wide});

struct NormBackwardLaunches {
  Launch means;  // NormBackwardMeans, before NormBackwardTiles, if dz is wanted
  Launch main;   // NormBackwardRows, NormBackwardRegisters or, its path being reread, NormBackwardTiles
};
NormBackwardLaunches norm_backward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, NormBackwardKind, const Knobs* = nullptr);
// The most partial rows that either path makes, at any alignment and with any knobs.
int64_t norm_partial_rows(const DeviceProfile&, int64_t rows, int64_t cols, bool centered);

}  // namespace liger::launch
