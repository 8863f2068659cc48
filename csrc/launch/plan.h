// LaunchPlan: from a device and a shape, how a kernel is launched. No launch constant is written anywhere else.
#pragma once
#include <algorithm>
#include <cstdint>

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
  int threads_per_row = 32; // a power of two; within a warp, or whole warps of one block
  int block = 32;           // threads; block / threads_per_row rows at a time
  int grid = 1;
  int smem = 0;             // dynamic shared memory, bytes
  int warp = 32;
  int partial_rows = 0;     // of fp32 partial sums that a second kernel adds up (column sums: dweight, dbias)
};

// How a row of `cols` elements is spread over threads: at most `max_k` vectors a thread, blocks of at most `max_block`.
struct RowTiling {
  int vec = 1;            // elements per access; 1 where alignment forbids more
  int max_k = 4;
  int max_block = 1024;
  int min_block = 128;    // short rows share a block until it has this many threads
  int prefer_k = 2;       // vectors a thread should have before more threads are taken
};
LaunchPlan plan_row(const DeviceProfile&, int64_t rows, int64_t cols, const RowTiling&);

// The same with a persistent grid of about `blocks_per_multiprocessor` blocks: each block walks over rows and keeps one fp32
// partial row of every column sum; partial_rows is the number of such rows.
LaunchPlan plan_persistent_rows(const DeviceProfile&, int64_t rows, int64_t cols, const RowTiling&, int blocks_per_multiprocessor);

// `work` independent items (vectors), `per_thread` each.
LaunchPlan plan_elementwise(const DeviceProfile&, int64_t work, int per_thread, int block = 256);

// Sums `partial_rows` rows of `cols` floats: a block owns 32 columns and all rows.
LaunchPlan plan_column_sum(const DeviceProfile&, int64_t partial_rows, int64_t cols);

}  // namespace liger::launch
