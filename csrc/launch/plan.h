// LaunchPlan: the threads, blocks and shared memory with which a kernel is launched on a device for a shape; and the planners that several
// ops use. Launch constants are in csrc/launch alone: constants of several kernels here, in plan.cpp and in launch.h, constants of one op
// in its <op>.h and <op>.cpp.
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

// The last step of each choice of a planner: a knob, clamped to the legal range from `least` to `most`, replaces the planner's choice
// (`choice`). If least > most, the knob becomes `least`.
constexpr int64_t with_knob(int64_t choice, int64_t knob, int64_t least, int64_t most) {
  return knob > 0 ? std::clamp(knob, least, std::max(least, most)) : choice;
}
// The same for a choice that must be a power of two. The bounds are powers of two.
constexpr int64_t with_knob_pow2(int64_t choice, int64_t knob, int64_t least, int64_t most) {
  return with_knob(choice, knob > 0 ? next_pow2(knob) : 0, least, most);
}

// regs: the threads of a row hold it in registers (and shared memory), so that the kernel reads it once. two_pass: they do not hold the
// row; a kernel that needs it twice reads it twice.
enum class Path { regs, two_pass };

struct LaunchPlan {
  Path path = Path::regs;
  int vec = 1;              // elements per access: mostly as many as 16 bytes hold; 1 where the kernel cannot have wide accesses
  int k = 1;                // vectors that a thread holds in registers, or that it loads before it uses the first one
  int slots = 0;            // further vectors that a thread holds in shared memory
  int threads_per_row = 32; // a power of two within a warp, whole warps of one block, or all threads of a cluster
  int block = 32;           // threads per block; a block processes block / threads_per_row rows at a time
  int grid = 1;             // blocks, a multiple of cluster
  int cluster = 1;          // blocks that share a row
  int smem = 0;             // dynamic shared memory, bytes
  int stages = 0;           // pipeline stages in shared memory, into which rows are fetched ahead (gpu/row_stream.h); 0: none
  int shared_offset = 0;    // bytes: where the stages, or the vectors of `slots`, begin in shared memory, behind the reductions' buffers
  bool pdl = false;         // programmatic dependent launch: the kernel may start while the one before it still runs
  int warp = 32;            // threads per warp on this device
  int lanes = 1, q_slots = 1, k_slots = 1;  // plan_rope
  int partial_rows = 0;     // rows of fp32 partial sums that this kernel writes and a second kernel adds up (dweight, dbias)
};

// Throws std::length_error if the device is AMD's and the launch has 2^32 threads or more, which HIP refuses. CUDA accepts every grid that
// a plan can have.
void check_threads(const DeviceProfile&, const LaunchPlan&);

// The rule by which plan_row spreads a row over threads. The number of threads is the smallest power of two with which no thread has more
// than `k` vectors, but at most max_block, and at least eight if the row has that many vectors.
struct RowTiling {
  int vec = 1;            // elements per access; 1 where alignment forbids more
  int max_k = 4;          // the most vectors that a thread's registers hold: a thread has more than `k` if the block has too few threads
  int max_block = 1024;   // the most threads that the planner chooses
  int bound = 1024;       // the kernel's launch bound: the most threads that a knob can set
  int min_block = 128;    // short rows share a block, so that it has at least this many threads
  int k = 2;
  // An exception for long rows: from long_from threads on, a thread may have long_k vectors. 0: there is no exception.
  int long_k = 0, long_from = 0;
};
LaunchPlan plan_row(const DeviceProfile&, int64_t rows, int64_t cols, const RowTiling&, const Knobs& = {});

// True if a call has so few rows that the device is not full even with a block for each row. Each row then gets more threads.
inline bool few_rows(const DeviceProfile& device, int64_t rows) { return rows < 2 * device.multiprocessors; }
// For kernels that hold a row in registers (the forward of the norms, GroupNorm's backward, losses in place): as plan_row, but calls of few
// rows get one vector per thread. Rows that a block cannot hold and, in calls of more rows, rows of `cluster_from` vectors or more get a
// cluster of blocks if the device supports a cluster that holds them. Otherwise a row that max_block threads cannot hold gets a block of up
// to `bound` threads, which reads the row twice if they cannot hold it either.
LaunchPlan plan_row_forward(const DeviceProfile&, int64_t rows, int64_t cols, RowTiling, const Knobs& = {},
                            int64_t cluster_from = std::numeric_limits<int64_t>::max());
constexpr int cluster_block = 256;  // threads per block in these clusters
// Returns `plan` with a cluster of blocks for each row, of `block` threads with at most k vectors each. It does so if a single block cannot
// hold the row (plan.path is two_pass), or if `wants`, the number of blocks that should share a row, is two or more. Returns `plan`
// unchanged otherwise, for accesses of single elements, and where the device has no clusters of a fitting size.
LaunchPlan with_cluster(const DeviceProfile&, LaunchPlan plan, int64_t rows, int64_t cols, int k, int block, int64_t wants);
// The number of clusters of persistent blocks that a device holds if each multiprocessor has `resident` of the blocks (clamped to 1 to 3).
int64_t persistent_clusters(const DeviceProfile&, int64_t cluster, int resident);
// Returns `blocks` as a grid of at least 1. Throws std::length_error if that is more than a launch can have.
int checked_grid(int64_t blocks);
// Bytes of shared memory that each of `resident` blocks on a multiprocessor can have. The driver reserves 1,024 bytes per block.
inline int shared_room(const DeviceProfile& device, int64_t resident) {
  return std::min<int64_t>(device.shared_per_block_optin, device.shared_per_multiprocessor / resident - 1024);
}
// The most pipeline stages of asynchronous copies, each of which holds a row: the row in use, and three in flight, since wait_for_copies
// (platform_cuda.h) can leave at most three in flight.
constexpr int async_stages = 4;
// Bytes of one pipeline stage of a block (gpu/row_stream.h): plan.k vectors of 16 bytes of each of `tensors` tensors, for each thread.
// Where there are bulk copies, also one counter of arrived bytes (mbarrier) for each warp.
inline int ring_row_bytes(const DeviceProfile& device, const LaunchPlan& plan, int tensors) {
  return plan.block * tensors * plan.k * 16 + (device.bulk_copies ? plan.block / plan.warp * 8 : 0);
}
// One block per row. The block loops over the row, which may have any length.
LaunchPlan plan_block_per_row(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// Sums over the rows of a matrix, for each column (dbias, and the norms' backward where registers do not hold rows). The matrix is cut
// into tiles of block * vec columns and into ranges of rows. A block processes one tile of one range. partial_rows is the number of ranges.
LaunchPlan plan_row_ranges(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// `work` independent items (vectors). Each thread processes `per_thread` of them.
LaunchPlan plan_elementwise(const DeviceProfile&, int64_t work, int per_thread, int block = 256);

// The fewest threads of a row that may begin at any address and have any length. A different thread processes each single element before
// the row's first aligned vector and behind its last whole vector.
constexpr int min_edge_threads = 16;

// Elementwise work on rows that may have gaps between them. A row is cut into tiles of threads_per_row * k vectors. A block processes one
// tile of one row, or of each of several short rows. Block number = (number of the group of rows) * tiles_per_row + number of the tile.
LaunchPlan plan_row_tiles(const DeviceProfile&, int64_t rows, int64_t cols, int vec, int per_thread, int min_threads = 1,
                          const Knobs& = {});

// Rotary embedding. threads_per_row = lanes * (q_slots + k_slots) threads process a position. `lanes` threads side by side process a head;
// q_slots (k_slots) groups of `lanes` threads share the heads of q (k), at most heads_per_thread heads each. A block may begin at any of a
// position's threads. All blocks together have fewer than 2^31 threads, so the plan may cover only the first of the positions.
// Returns the plan, and the number of these positions.
std::pair<LaunchPlan, int64_t> plan_rope(const DeviceProfile&, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t places,
                                         int heads_per_thread, const Knobs& = {});

// The kernel that adds up partial rows (gpu/column_sum.h). Columns come in two groups: dweight's, then dbias's. A block has threads_per_row
// * vec columns of one group, and all rows. Up to 32 threads share their columns; a thread adds up about four rows, or more if there are
// many.
LaunchPlan plan_column_sum(const DeviceProfile&, int64_t partial_rows, int64_t first_cols, int64_t second_cols);

// Rows of logits (or log-probabilities): at most one block per row. Its threads loop over the row. With `stash`, the kernel needs each row
// twice: each thread keeps its first vectors of the row in shared memory (plan.slots), behind the `shared_bytes` of reductions, and reads
// the other vectors from memory again. The plan limits how many rows are processed at a time, so that the vectors to be read again fit the
// L2. plan.path is regs if all vectors of a row are kept.
LaunchPlan plan_logits(const DeviceProfile&, int64_t rows, int64_t vocab, int element_bytes, int vec, int shared_bytes, bool stash,
                       const Knobs& = {});

// One block that sums n values, with `bytes` bytes of shared memory per warp.
LaunchPlan plan_block_sum(const DeviceProfile&, int64_t n, int bytes);

}  // namespace liger::launch
