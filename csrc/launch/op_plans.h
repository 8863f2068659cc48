// The plans of whole ops: plan.h's tilings with each op's own numbers. gpu/<op>.cu launches what these functions return and has no
// numbers of its own; plans() lists an op's launches by name, for Python: the doctor shows them, tests ask whether they are legal and
// cover everything, both for GPUs that nobody here has.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/plan.h"

namespace liger::launch {

// The largest blocks of each kind of kernel: their launch bounds, from which the compiler takes how many registers a thread may have.
constexpr int row_threads = 1024;       // the threads of a row hold it, or walk over it
constexpr int piece_threads = 256;      // independent pieces, nothing is exchanged
constexpr int logits_threads = 512;     // of cross entropy's rows
constexpr int logits_row_threads = 128; // of those with a block each, if there are enough of them
constexpr int cluster_threads = 512;    // of a cluster's blocks

// Dynamic shared memory of reductions of `values` floats at a time over the threads of a row (RowGroup): two inboxes of 8 bytes, and two
// buffers of one float for each warp of the block, or of the cluster.
constexpr int reduction_bytes(int values, int cluster = 1) { return 2 * 8 + 2 * values * 32 * cluster * int(sizeof(float)); }

// Vectors that a thread has in registers, or in flight.
constexpr int norm_forward_k(int vec) { return vec == 1 ? 4 : 8; }
constexpr int softmax_forward_k = 8, softmax_backward_k = 4;  // wide vectors; single elements: 4
constexpr int glu_k = 2;
constexpr int piece_k = 4;
constexpr int rope_heads_in_flight = 2;
// Of cross entropy's rows; fewer where the options need the registers.
constexpr int logits_in_flight(bool full) { return full ? 2 : 4; }
constexpr int logit_tile_k(int vec) { return vec == 1 ? 2 : 4; }
constexpr int piece_vec = 8;  // elements of a piece's vectors, of any dtype

// Knobs are those of the op's kernel for this call (knobs.h). Each of these throws std::length_error where a tensor needs more threads than
// one launch can have on the device.

// The norms. `vec`: elements of an access, 1 where 16 bytes are not aligned. `two`: tensors are read.
struct NormForwardKind {
  bool centered, two;
};
LaunchPlan plan_norm_forward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, NormForwardKind, const Knobs& = {});
// Launch bound of the registers path in clusters. It makes room for three blocks of 256 threads, whose registers hold RMSNorm's weights,
// too; of LayerNorm, which loads weights and biases late, for four; of two tensors for two.
constexpr int norm_cluster_bound(NormForwardKind kind) { return kind.two ? cluster_threads : kind.centered ? 1000 : 768; }
// The backward's two paths (plan.h). Rows of mixed dtypes always take tiles. With a second set of sums, or with the addresses of single
// elements, 1,024 threads would not have enough registers; where there are clusters, blocks of 512 are better.
inline int norm_backward_threads(const DeviceProfile& device, bool centered, int vec) {
  return centered || vec == 1 || device.bulk_copies ? 512 : 1024;
}
// Vectors a thread may have: of a third one, a second set of sums, or a row fetched ahead into registers, leaves no room for the weights.
inline int norm_backward_max_k(const DeviceProfile& device, bool centered) {
  return (device.bulk_copies || device.async_copies) && !centered ? 3 : 2;
}
// Launch bound of the registers path for rows of so many threads.
constexpr int norm_backward_bound(int threads) { return threads > 512 ? 1024 : 512; }
constexpr int norm_backward_rows_threads = 512;  // where there are no sums
struct NormBackwardKind {
  bool centered, mixed;
  bool frozen;  // no parameter wants a gradient, and the weight is of z's type
  int inputs;  // dy, z and perhaps dsum
};
struct NormBackwardPlans {
  std::optional<LaunchPlan> rows;  // NormBackwardRows alone; or
  LaunchPlan sums;  // NormBackwardRegisters; or, its path being reread, NormBackwardTiles
  LaunchPlan means;  // NormBackwardMeans: before the tiles, if dz is wanted
};
NormBackwardPlans plan_norm_backward_paths(const DeviceProfile&, int64_t rows, int64_t cols, int vec, NormBackwardKind, const Knobs& = {});
// The most partial rows that either path makes, at any alignment and with any knobs.
int64_t norm_partial_rows(const DeviceProfile&, int64_t rows, int64_t cols, bool centered);

LaunchPlan plan_softmax(const DeviceProfile&, int64_t rows, int64_t cols, int vec, int wide_k, const Knobs& = {});
LaunchPlan plan_glu(const DeviceProfile&, int64_t rows, int64_t cols, int vec, const Knobs& = {});
RopePlan plan_rope_heads(const DeviceProfile&, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t head_dim, int64_t rotary_dim,
                         int vec, const Knobs& = {});

// Cross entropy's rows; `in_place`: the fused loss's kernel, which needs each row twice.
LaunchPlan plan_cross_entropy(const DeviceProfile&, int64_t rows, int64_t vocab, int element_bytes, int vec, bool in_place,
                              const Knobs& = {});
// Is each row a block's of logits_row_threads threads? There is a kernel for them.
inline bool whole_block_rows(const LaunchPlan& plan) { return plan.block == logits_row_threads && plan.threads_per_row == plan.block; }
// The fused loss's kernel for rows that a block's, or a cluster's, registers hold; path is regs where they do.
LaunchPlan plan_cross_entropy_held(const DeviceProfile&, int64_t rows, int64_t vocab, int vec, const Knobs& = {});
// Its launch bound, for so many vectors a thread.
constexpr int in_place_bound(int k) { return k == 8 ? row_threads : k == 10 ? 256 : cluster_threads; }
// The backward's tiles of rows.
LaunchPlan plan_cross_entropy_tiles(const DeviceProfile&, int64_t rows, int64_t vocab, int vec, const Knobs& = {});
// Its sums over rows, three fp64 values a warp, in one block; `each`: a row's loss is its own (reduction "none").
LaunchPlan plan_cross_entropy_counts(const DeviceProfile&, int64_t rows, int64_t vocab);
LaunchPlan plan_cross_entropy_reduce(const DeviceProfile&, int64_t rows, bool each);

// The passes between the fused loss's matmuls.
LaunchPlan plan_row_pieces(const DeviceProfile&, int64_t rows, int64_t cols, int vec);
LaunchPlan plan_column_shares(const DeviceProfile&, int64_t rows, int64_t cols, int vec);
LaunchPlan plan_scalar(const DeviceProfile&, int64_t factors);  // one number of as many
LaunchPlan plan_stream_copy(const DeviceProfile&, int64_t vectors, int per_thread);

// What a call of an op is, as far as its launches depend on it.
struct Call {
  int64_t rows = 1, cols = 1;  // of x, gate, logits; rope: positions and head_dim; fused loss: tokens and vocabulary
  int element_bytes = 2;
  bool aligned = true;  // 16-byte accesses fit all rows
  bool contiguous = true;  // no gaps between rows
  bool mixed = false;  // norms, backward: dtypes differ
  bool per_row = false;  // losses: reduction "none"
  bool bias = false;  // layer_norm, fused loss
  bool frozen = false;  // norms, backward: no parameter wants a gradient, and the weight is of x's type
  int64_t q_heads = 1, k_heads = 1, rotary_dim = 0;  // rope; rotary_dim 0: all of the head
  int64_t hidden = 1, chunk_rows = 0;  // fused loss; chunk_rows 0: one chunk
  Knobs knobs;  // for those of its launches that have some
};

struct NamedLaunch {
  std::string kernel;  // its struct's name in csrc/gpu
  std::vector<int> instance;  // its integer template arguments: elements of an access, then what the kernel adds
  int64_t rows, cols;  // what it works on
  LaunchPlan plan;
  int max_threads;  // its launch bound
  Tunable tunable = Tunable::none;  // whose knobs it takes
};

// The launches of an op, in order; std::invalid_argument lists the ops there are. Matmuls, which are cuBLAS's or hipBLAS's, are not among
// them. A fused loss's are those of its first chunk.
std::vector<NamedLaunch> plans(std::string_view op, const DeviceProfile&, const Call&);
std::vector<std::string> planned_ops();

}  // namespace liger::launch
