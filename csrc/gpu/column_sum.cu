// Adds up the rows of a [partial rows, columns] fp32 matrix, most of which is in the L2. A block owns some neighbouring columns of all
// rows, so that a row's loads are at least 128 contiguous bytes where columns suffice. A thread owns VEC of them. The block's thread groups
// share the rows, and their sums are added up in shared memory. Blocks are small, so that they fit on a multiprocessor beside the kernel
// that writes the matrix and are resident when it ends.
#include "gpu/column_sum.h"

#include "gpu/platform.h"

namespace liger::gpu {
namespace {

template <int VEC> struct SumColumns {
  struct Args {
    PartialSums partial;
    ColumnTotals totals;
    int64_t first_blocks;
    int width;  // columns of a block
  };
  using Vector = Vec<float, VEC>;
  static constexpr int max_threads = launch::sum_columns_kernel.instance(VEC).max_threads,
                       in_flight = VEC == 4 ? 4 : 8;  // loads in flight per thread: most threads have no more rows
  static LIGER_DEVICE void run(const Args& a) {
    const int width = a.width, lanes = width / VEC, lane = thread_id() & (lanes - 1), group = thread_id() >> highest_bit(lanes),
              groups = block_threads() >> highest_bit(lanes);
    const bool second = block_id() >= a.first_blocks;
    const ColumnTotal& total = second ? a.totals.second : a.totals.first;
    const int64_t begin = (block_id() - (second ? a.first_blocks : 0)) * width, col = begin + lane * VEC;
    wait_for_previous_kernel();
    Vector sum = {};
    if (col < total.cols) {
      const float* at = a.partial.data + (total.first_column + col + group * a.partial.stride);
      const int64_t step = groups * a.partial.stride;
      for (int64_t row = group; row < a.partial.rows; row += in_flight * groups, at += in_flight * step) {
        Vector v[in_flight] = {};
#pragma unroll
        for (int k = 0; k < in_flight; ++k)
          if (row + k * groups < a.partial.rows) load(v[k], at + k * step);
#pragma unroll
        for (int half = in_flight / 2; half > 0; half /= 2)  // pairwise: a smaller rounding error than one after another
#pragma unroll
          for (int k = 0; k < half; ++k) add(v[k], v[k + half]);
        add(sum, v[0]);
      }
    }
    // Reduces within each warp by shuffles, then across warps in shared memory.
    for (int mask = warp_width() / 2; mask >= lanes; mask /= 2) {
      Vector other;
#pragma unroll
      for (int i = 0; i < VEC; ++i) other[i] = shfl_xor(sum[i], mask);
      add(sum, other);
    }
    const Shared<float> sums = shared<float>(0);
    store(&sums[thread_id() * VEC], sum);
    block_barrier();
    const int step = (lanes > warp_width() ? lanes : warp_width()) * VEC;
    for (int nth = thread_id(); nth < width && begin + nth < total.cols; nth += block_threads()) {
      ExactSum all;
#pragma unroll 8
      for (int at = nth; at < block_threads() * VEC; at += step) all.add(sums[at]);
      if (total.accumulate) all.add(load_one(total.out.data, total.out.dtype, begin + nth));
      store_one(total.out.data, total.out.dtype, begin + nth, all.total());
    }
  }
  LIGER_DEVICE static void add(Vector& sum, const Vector& more) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum[i] += more[i];
  }
};

}  // namespace

void sum_columns(const launch::Launch& config, const PartialSums& partial, ColumnTotals totals, Stream stream) {
  for (ColumnTotal* total : {&totals.first, &totals.second})
    if (total->out.data == nullptr) total->cols = 0;
  const int width = config.plan.threads_per_row * config.plan.vec;
  with_instance<launch::sum_columns_kernel>(config, [&]<Instance I>() {
    launch<SumColumns<I.vec>>(config, {partial, totals, launch::ceil_div(totals.first.cols, width), width}, stream);
  });
}

}  // namespace liger::gpu
