// LaunchPlan: how a kernel is launched on a device for a shape: threads, blocks, shared memory. Launch constants are in
// csrc/launch alone: what several kernels share is here and in plan.cpp, what belongs to one op is in its <op>.h and <op>.cpp.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "launch/knobs.h"
#include "launch/profile.h"

namespace liger::launch {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t next_pow2(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// The last step of each choice of a planner: a knob, clamped to what is legal, replaces what the planner itself has chosen. If the bounds
// contradict each other, `least` counts.
constexpr int64_t settled(int64_t own, int64_t knob, int64_t least, int64_t most) {
  return knob > 0 ? std::clamp(knob, least, std::max(least, most)) : own;
}
// The same for a choice that is a power of two, as the bounds are.
constexpr int64_t settled_pow2(int64_t own, int64_t knob, int64_t least, int64_t most) {
  return settled(own, knob > 0 ? next_pow2(knob) : 0, least, most);
}

// regs: the threads of a row hold it in registers, so that it is read from memory once. reread: the row is too long for that and is read
// twice.
enum class Path { regs, reread };

struct LaunchPlan {
  Path path = Path::regs;
  int vec = 1;              // elements per access: as many as 16 bytes hold, or 1 where rows are not aligned to 16 bytes
  int k = 1;                // vectors that a thread holds in registers (regs), or that it loads before it uses the first one (reread)
  int slots = 0;            // vectors that a thread holds in shared memory besides
  int threads_per_row = 32; // part of a warp, which is a power of two, whole warps of one block, or all threads of a cluster
  int block = 32;           // threads per block, which processes block / threads_per_row rows at a time
  int grid = 1;             // blocks, a multiple of cluster
  int cluster = 1;          // blocks that share a row
  int smem = 0;             // dynamic shared memory, bytes
  int stages = 0;           // rows of the ring buffer in shared memory that fetches rows ahead (gpu/row_stream.h); 0: no ring
  int shared_offset = 0;    // where the ring or the slots begin in shared memory, bytes: behind what reductions take
  bool pdl = false;         // programmatic dependent launch: it starts while the kernel before it still runs
  int warp = 32;            // threads per warp on this device
  int partial_rows = 0;     // rows of fp32 partial sums that this kernel writes and a second kernel adds up (dweight, dbias)
};

// Throws std::length_error if the device is AMD's and the launch has 2^32 threads or more, which HIP refuses. CUDA takes every grid that
// plans have.
void check_threads(const DeviceProfile&, const LaunchPlan&);

// How plan_row spreads a row over threads: over the smallest power of two of threads such that none has more than `k` vectors, but over
// max_block of them at most.
struct RowTiling {
  int vec = 1;            // elements per access; 1 where alignment forbids more
  int max_k = 4;          // the most vectors of a thread if the block has too few threads for `k`: what its registers hold
  int max_block = 1024;   // the most threads
  int bound = 1024;       // the most threads that the kernel takes, if a knob asks for more than max_block
  int min_block = 128;    // short rows share a block, so that it has at least this many threads
  int k = 2;
  // An exception for long rows: from long_from threads on, a thread may have long_k vectors. 0: there is no exception.
  int long_k = 0, long_from = 0;
};
LaunchPlan plan_row(const DeviceProfile&, int64_t rows, int64_t cols, const RowTiling&, const Knobs& = {});

// True if a call has so few rows that the device is not full even with a block for each: each row then gets more threads.
inline bool few_rows(const DeviceProfile& device, int64_t rows) { return rows < 2 * device.multiprocessors; }
// For kernels that hold a row in registers (the forward of the norms, losses in place): as plan_row, but calls of few rows get one vector
// per thread. Rows that a block cannot hold, and all of `cluster_from` vectors or more, get a cluster of blocks if the device has one that
// holds them; else one block each, which reads the row twice.
LaunchPlan plan_row_forward(const DeviceProfile&, int64_t rows, int64_t cols, RowTiling, const Knobs& = {},
                            int64_t cluster_from = std::numeric_limits<int64_t>::max());
constexpr int cluster_block = 256;  // threads of such a block
// Gives each row a cluster of blocks of `block` threads with at most k vectors each, if a single block cannot hold the row, or if it
// `wants` two blocks or more; provided that the device has clusters of the size. Otherwise returns `plan` unchanged.
LaunchPlan clustered(const DeviceProfile&, LaunchPlan plan, int64_t rows, int64_t cols, int k, int block, int64_t wants);
// How many clusters of persistent blocks a device holds if each multiprocessor has `resident` of the blocks, which may be at most three.
int64_t persistent_clusters(const DeviceProfile&, int64_t cluster, int resident);
// The grid of a launch that covers `blocks` of work. Throws std::length_error if that is more than a launch can have.
int grid_of(int64_t blocks);
// Bytes of shared memory that each of `resident` blocks on a multiprocessor can have. A driver takes 1,024 for itself per block.
inline int shared_room(const DeviceProfile& device, int64_t resident) {
  return std::min<int64_t>(device.shared_per_block_optin, device.shared_per_multiprocessor / resident - 1024);
}
// The most rows of a ring of asynchronous copies: the row that is used, and three in flight, as many as wait_for_copies (platform_cuda.h)
// can leave there.
constexpr int async_stages = 4;
// Bytes of one row in the rings of a block's threads (gpu/row_stream.h): plan.k vectors of 16 bytes of each of `tensors`, for each thread,
// and where there are bulk copies, a counter of arrived bytes (mbarrier) for each warp.
inline int ring_row_bytes(const DeviceProfile& device, const LaunchPlan& plan, int tensors) {
  return plan.block * tensors * plan.k * 16 + (device.bulk_copies ? plan.block / plan.warp * 8 : 0);
}
// One block per row, of any length, which loops over the row.
LaunchPlan plan_block_per_row(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// Sums over the rows of a matrix, for each column (the backward of norms whose rows registers cannot hold, dbias). It is cut into tiles of
// block * vec columns and ranges of rows, and a block has one tile of one range. partial_rows is the number of ranges.
LaunchPlan plan_row_ranges(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// `work` independent items (vectors), of which each thread processes `per_thread`.
LaunchPlan plan_elementwise(const DeviceProfile&, int64_t work, int per_thread, int block = 256);

// The fewest threads of a row that may begin at any address and have any length: each element before its first aligned vector, and behind
// its last whole one, is given to a thread of its own.
constexpr int min_edge_threads = 16;

// Elementwise work on rows that may have gaps between them. A row is cut into tiles of threads_per_row * k vectors; a block processes one
// tile of one row, or of several short rows. Block number = (number of the group of rows) * tiles_per_row + number of the tile.
LaunchPlan plan_row_tiles(const DeviceProfile&, int64_t rows, int64_t cols, int vec, int per_thread, int min_threads = 1,
                          const Knobs& = {});

// Rotary embedding: a position's threads are `lanes` side by side in a head times slots for heads of q and of k, as many as
// it takes for each to have at most heads_per_thread heads; threads_per_row is their product, and blocks may begin anywhere in it. The plan
// is for the first `positions`, in blocks of fewer than 2^31 threads together.
struct RopePlan {
  LaunchPlan launch;
  int64_t positions = 1;
  int lanes = 1, q_slots = 1, k_slots = 1;
};
RopePlan plan_rope(const DeviceProfile&, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t places, int heads_per_thread,
                   const Knobs& = {});

// The kernel that adds up partial rows (gpu/column_sum.h). Columns come in two groups (those of dweight, then those of dbias). A block has
// threads_per_row columns of one group, and all rows; a thread adds up about four of the rows.
LaunchPlan plan_column_sum(const DeviceProfile&, int64_t partial_rows, int64_t first_cols, int64_t second_cols);

// Rows of logits (cross entropy): at most one block per row, whose threads loop over it. With `stash`, each thread keeps its first vectors
// of the row in shared memory (slots), behind the `shared_bytes` of reductions, so that they need not be read again. The rest of the rows
// is read again; the plan limits how many rows are processed at a time, so that this rest of all of them fits the L2. path is regs if there
// is no rest.
LaunchPlan plan_logits(const DeviceProfile&, int64_t rows, int64_t vocab, int element_bytes, int vec, int shared_bytes, bool stash,
                       const Knobs& = {});

// One block that sums n values, with `bytes` of shared memory per warp.
LaunchPlan plan_block_sum(const DeviceProfile&, int64_t n, int bytes);

}  // namespace liger::launch
