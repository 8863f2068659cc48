// Adds the rows of a [partial rows, columns] fp32 matrix that mostly lies in the L2. A block owns 32 neighbouring columns (one
// 128-byte line of each row) and all rows, which its groups of 32 threads share; the groups' sums meet in shared memory.
#include "gpu/column_sum.h"

#include "gpu/platform.h"

namespace liger::gpu {
namespace {

struct SumColumns {
  struct Args {
    PartialSums partial;
    ColumnTotal total;
  };
  static constexpr int max_threads = launch::row_threads;
  static LIGER_DEVICE void run(const Args& a) {
    const int lane = thread_id() % 32, group = thread_id() / 32, groups = block_threads() / 32;
    const int64_t col = block_id() * 32 + lane;
    const bool live = col < a.total.cols;
    float sum = 0;
    if (live) {
      const float* column = a.partial.data + a.total.first_column + col;
      int64_t row = group;
      // Four loads in flight.
      for (; row + 3 * groups < a.partial.rows; row += 4 * groups) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = column[(row + i * groups) * a.partial.stride];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += v[i];
      }
      for (; row < a.partial.rows; row += groups) sum += column[row * a.partial.stride];
    }
    const Shared<float> sums = shared<float>(0);
    sums[thread_id()] = sum;
    block_barrier();
    if (group == 0 && live) {
      for (int g = 1; g < groups; ++g) sum += sums[g * 32 + lane];
      if (a.total.accumulate) sum += load_one(a.total.out.data, a.total.out.dtype, col);
      store_one(a.total.out.data, a.total.out.dtype, col, sum);
    }
  }
};

}  // namespace

void sum_columns(const PartialSums& partial, const ColumnTotal& total, Stream stream) {
  if (total.out.data == nullptr || total.cols == 0) return;
  launch<SumColumns>(launch::plan_column_sum(device_profile(stream.device), partial.rows, total.cols), {partial, total}, stream);
}

}  // namespace liger::gpu
