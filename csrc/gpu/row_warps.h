// RowWarps: the threads that share one row, as any number of whole warps of a block, and sums over them. (BasicRowGroup in rows.h requires
// a power of two of threads.)
//
// Each warp sums by shuffles and writes its sums to shared memory. Behind a barrier of the row's threads, each thread adds up the sums of
// all warps in the same order, so that all threads have the same bits. Successive sums use two buffers in turn, as in BasicRowGroup.
//
// OneRow: a block has one row, whose threads meet at block_barrier(). Several rows of a block have a barrier each, whose number is not a
// compile-time constant: NVIDIA's compiler then reserves all 16 barriers, so that at most four blocks fit on a multiprocessor.
#pragma once
#include "gpu/rows.h"
#include "launch/norms.h"

namespace liger::gpu {

template <bool OneRow> struct RowWarps {
  static constexpr bool whole_warps = true;
  // index: this thread's number in its row. rows_in_block: the rows of the block. row_in_block: the number of this thread's row among them.
  int threads_per_row, warps, row_in_block, rows_in_block, index, turn = 0;

  LIGER_DEVICE explicit RowWarps(int threads) : threads_per_row(threads), warps(threads / warp_width()) {
    if constexpr (OneRow) {
      row_in_block = 0, rows_in_block = 1, index = thread_id();
    } else {
      const int warp = uniform(warp_id());
      row_in_block = warp / warps;
      rows_in_block = block_threads() / threads;
      index = (warp - row_in_block * warps) * warp_width() + lane_id();
    }
  }
  template <int N> static constexpr int shared_bytes() { return launch::row_warps_floats * int(sizeof(float)); }
  LIGER_DEVICE int rows_per_block() const { return rows_in_block; }
  LIGER_DEVICE int lanes() const { return warp_width(); }
  LIGER_DEVICE int64_t cluster_index() const { return block_id(); }
  LIGER_DEVICE int64_t cluster_count() const { return grid_blocks(); }
  LIGER_DEVICE int64_t first_row() const { return block_id() * rows_in_block + row_in_block; }

  LIGER_DEVICE float sum(float v) {
    float one[1] = {v};
    sum(one);
    return one[0];
  }
  // Replaces each value by its sum over the threads of the row, all of which must call it together; on devices without group barriers, all
  // threads of the block must.
  template <int N> LIGER_DEVICE void sum(float (&v)[N]) {
    static_assert(N <= 2);
    const bool upper = N == 2 && lane_id() >= warp_width() / 2;
    float mine = v[0];
    if constexpr (N == 2) {  // the lower half of the lanes sums v[0], the upper half v[1]
      const float others = shfl_xor(upper ? v[0] : v[1], warp_width() / 2);
      mine = (upper ? v[1] : v[0]) + others;
    }
#pragma unroll
    for (int mask = warp_width() / N / 2; mask > 0; mask /= 2) mine += shfl_xor(mine, mask);
    if (warps == 1) {
      const float others = N == 2 ? shfl_xor(mine, warp_width() / 2) : 0;
      v[0] = upper ? others : mine;
      if constexpr (N == 2) v[1] = upper ? mine : others;
      return;
    }
    const int used = warps * N, pitch = (used + 7) & ~7;
    const Shared<float> sums = shared<float>(((turn & 1) * (launch::row_warps_floats / 2) + row_in_block * pitch) * int(sizeof(float)));
    ++turn;
    if ((lane_id() & (warp_width() / N - 1)) == 0) sums[index / warp_width() * N + upper] = mine;
    if (index < pitch - used) sums[used + index] = 0;  // zeros, since the loop below reads eight sums at a time
    if constexpr (OneRow) block_barrier();
    else group_barrier(row_in_block, threads_per_row);
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] = 0;
#pragma unroll 1
    for (int at = 0; at < pitch; at += 8) {
      Vec<float, 8> warp_sums;
      load(warp_sums, &sums[at]);
#pragma unroll
      for (int n = 0; n < N; ++n)
        v[n] += N == 1 ? ((warp_sums[0] + warp_sums[1]) + (warp_sums[2] + warp_sums[3])) +
                             ((warp_sums[4] + warp_sums[5]) + (warp_sums[6] + warp_sums[7]))
                       : (warp_sums[n] + warp_sums[n + 2]) + (warp_sums[n + 4] + warp_sums[n + 6]);
    }
  }
};

}  // namespace liger::gpu
