// Adds up the rows of a [partial rows, columns] fp32 matrix, most of which is in the L2. A block owns a few neighbouring columns of all
// rows, at least the columns of a 32-byte sector. The block's thread groups share the rows, and their sums are added up in shared memory.
// Blocks are small, so that they fit on a multiprocessor beside the kernel that writes the matrix and are resident when it ends.
#include "gpu/column_sum.h"

#include "gpu/platform.h"
#include "launch/elementwise.h"

namespace liger::gpu {
namespace {

struct SumColumns {
  struct Args {
    PartialSums partial;
    ColumnTotals totals;
    int64_t first_blocks;
    int width;  // columns of a block
  };
  static constexpr int max_threads = launch::sum_columns_kernel.instance().max_threads,
                       in_flight = 8;  // loads in flight per thread: most threads have no more rows
  static LIGER_DEVICE void run(const Args& a) {
    const int width = a.width, lane = thread_id() & (width - 1), group = thread_id() >> highest_bit(width),
              groups = block_threads() >> highest_bit(width);
    const bool second = block_id() >= a.first_blocks;
    const ColumnTotal& total = second ? a.totals.second : a.totals.first;
    const int64_t col = (block_id() - (second ? a.first_blocks : 0)) * width + lane;
    const bool live = col < total.cols;
    wait_for_previous_kernel();
    float sum = 0;
    if (live) {
      const float* at = a.partial.data + (total.first_column + col + group * a.partial.stride);
      const int64_t step = groups * a.partial.stride;
      for (int64_t row = group; row < a.partial.rows; row += in_flight * groups, at += in_flight * step) {
        float v[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; ++k) v[k] = row + k * groups < a.partial.rows ? at[k * step] : 0;
#pragma unroll
        for (int half = in_flight / 2; half > 0; half /= 2)  // pairwise: a smaller rounding error than one after another
#pragma unroll
          for (int k = 0; k < half; ++k) v[k] += v[k + half];
        sum += v[0];
      }
    }
    // Reduces within each warp by shuffles, then across warps in shared memory.
    for (int mask = warp_width() / 2; mask >= width; mask /= 2) sum += shfl_xor(sum, mask);
    const Shared<float> sums = shared<float>(0);
    sums[thread_id()] = sum;
    block_barrier();
    if (group == 0 && live) {
      ExactSum all;
#pragma unroll 8
      for (int at = lane; at<block_threads(); at += width> warp_width() ? width : warp_width()) all.add(sums[at]);
      if (total.accumulate) all.add(load_one(total.out.data, total.out.dtype, col));
      store_one(total.out.data, total.out.dtype, col, all.total());
    }
  }
};

}  // namespace

void sum_columns(const PartialSums& partial, ColumnTotals totals, Stream stream) {
  for (ColumnTotal* total : {&totals.first, &totals.second})
    if (total->out.data == nullptr) total->cols = 0;
  if (totals.first.cols + totals.second.cols == 0) return;
  const launch::Launch config = launch::sum_columns(device_profile(stream.device), partial.rows, totals.first.cols, totals.second.cols);
  const int width = config.plan.threads_per_row;
  launch<SumColumns>(config, {partial, totals, launch::ceil_div(totals.first.cols, width), width}, stream);
}

}  // namespace liger::gpu
