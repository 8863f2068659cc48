// LaunchPlan: from a device and a shape, how a kernel is launched. No launch constant is written anywhere else.
#pragma once
#include <algorithm>
#include <cstdint>

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

// regs: a thread keeps its columns of a row in registers, one global read. reread: rows too long for that are read again.
enum class Path { regs, reread };

struct LaunchPlan {
  Path path = Path::regs;
  int vec = 1;              // elements of one access: 16 bytes' worth, or 1 where rows are not aligned
  int k = 1;                // vectors a thread holds (regs) or has in flight (reread)
  int threads_per_row = 32; // a power of two; within a warp, whole warps of one block, or all of a cluster
  int block = 32;           // threads; block / threads_per_row rows at a time
  int grid = 1;             // blocks, a multiple of cluster
  int cluster = 1;          // blocks that share a row
  int smem = 0;             // dynamic shared memory, bytes
  int stages = 0;           // rows of a ring of copies
  int ring_offset = 0;      // where it begins in shared memory
  bool pdl = false;         // starts while the kernel before it still runs
  int warp = 32;
  int partial_rows = 0;     // of fp32 partial sums that a second kernel adds up (column sums: dweight, dbias)
};

// std::length_error where HIP does not take the plan: fewer than 2^32 threads in a launch. CUDA takes any number of blocks that plans have.
void check_threads(const DeviceProfile&, const LaunchPlan&);

// How a row of `cols` elements is spread over threads: at most `max_k` vectors a thread, blocks of at most `max_block`.
struct RowTiling {
  int vec = 1;            // elements per access; 1 where alignment forbids more
  int max_k = 4;
  int max_block = 1024;
  int min_block = 128;    // short rows share a block until it has this many threads
  int prefer_k = 2;       // vectors a thread should have before more threads are taken
  int half_from = 0;      // rows of so many threads or more: half of them, where these have at most half_k vectors each; 0: none
  int half_k = 5;
};
LaunchPlan plan_row(const DeviceProfile&, int64_t rows, int64_t cols, const RowTiling&, const Knobs& = {});

// Kernels that keep a row in registers where max_k vectors a thread of a block, or of a cluster of blocks, hold it (the forward of
// the norms, softmax); longer rows: one block a row that reads twice.
struct RowForwardKind {
  int prefer_k = 4;               // RowTiling's
  int block = 512;                // threads that are better not exceeded, unless block_k vectors each do not hold the row
  int block_k = 0;                // 0: max_k
  int half_from = 0, half_k = 5;  // RowTiling's
  int cluster_from = 0;           // rows of so many vectors are better in a cluster, though a block would hold them; 0: none
};
// Rows with a block each, or less, that do not fill the device: more threads for each, then.
inline bool few_rows(const DeviceProfile& device, int64_t rows) { return rows < 2 * device.multiprocessors; }
LaunchPlan plan_row_forward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, int max_k, const RowForwardKind& = {},
                            const Knobs& = {});
// Gives a plan of persistent blocks its shared memory: `fixed` bytes, and behind them, if the device has such copies, rings for rows of
// `inputs` tensors. `resident`: blocks on a multiprocessor at a time. `stages`: rows of the ring, if there is room; 0: the planner's
// choice.
void add_ring(const DeviceProfile&, LaunchPlan&, int64_t rows, int inputs, int fixed, int resident, int stages);
constexpr int async_stages = 4;  // groups of copies that a thread can wait for
// One block a row, however long.
LaunchPlan plan_block_per_row(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// The backward of the norms: persistent blocks of at most max_block threads, whose registers hold the sums of their columns, of 2 or up
// to max_k = 3 vectors each (4 of single elements); partial_rows: one a block.
LaunchPlan plan_norm_backward(const DeviceProfile&, int64_t rows, int64_t cols, int vec, int max_block, int max_k, const Knobs& = {});
// Its blocks on a multiprocessor at a time.
constexpr int norm_backward_resident(const LaunchPlan& plan, const Knobs& knobs = {}) {
  return knobs.resident > 0 ? std::min(knobs.resident, 4) : plan.block <= 256 ? 2 : 1;
}
// Its re-read path: tiles of block * vec columns times ranges of rows; partial_rows: the number of ranges.
LaunchPlan plan_norm_tiles(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// `work` independent items (vectors), `per_thread` each.
LaunchPlan plan_elementwise(const DeviceProfile&, int64_t work, int per_thread, int block = 256);

// Elementwise work on rows with gaps between them: blocks of tiles of threads_per_row * k vectors of one row each, several short
// rows to a block; block = row group * tiles_per_row + tile.
LaunchPlan plan_row_tiles(const DeviceProfile&, int64_t rows, int64_t cols, int vec, int per_thread, int min_threads = 1,
                          const Knobs& = {});

// Rotary embedding: a position's threads are `lanes` side by side in a head times slots for heads of q and of k, so many that
// each has at most heads_per_thread heads; threads_per_row is their product, and blocks may begin anywhere in it. The plan is for the first
// `positions`, in blocks of fewer than 2^31 threads together.
struct RopePlan {
  LaunchPlan launch;
  int64_t positions = 1;
  int lanes = 1, q_slots = 1, k_slots = 1;
};
RopePlan plan_rope(const DeviceProfile&, int64_t positions, int64_t q_heads, int64_t k_heads, int64_t places, int heads_per_thread,
                   const Knobs& = {});

// Sums `partial_rows` rows of floats, of two groups of columns: a block owns threads_per_row columns of one group and all rows, of which
// a thread has about four.
LaunchPlan plan_column_sum(const DeviceProfile&, int64_t partial_rows, int64_t first_cols, int64_t second_cols);

// Threads that a row of logits needs at least: the elements before its first and behind its last whole vector are one thread's each.
constexpr int min_logit_threads = 16;
// Rows of logits (cross entropy), a row to at most one block of threads that walk over it. With `stash`, each thread keeps its
// first `k` vectors of the row in shared memory behind `shared_bytes` for reductions, so that they are read once; what the
// rows in flight leave out has to be read again and is bounded by the L2. path is regs if nothing is left out.
LaunchPlan plan_logits(const DeviceProfile&, int64_t rows, int64_t vocab, int element_bytes, int vec, int shared_bytes, bool stash,
                       const Knobs& = {});

// One block sums n values, with `bytes` of shared memory a warp.
LaunchPlan plan_block_sum(const DeviceProfile&, int64_t n, int bytes);

// Rows of `vectors` independent vectors each, `per_thread` to a thread; a row has grid / rows blocks.
LaunchPlan plan_pieces(const DeviceProfile&, int64_t rows, int64_t vectors, int per_thread);

}  // namespace liger::launch
