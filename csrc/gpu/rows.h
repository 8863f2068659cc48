// RowGroup: the threads that share one row, and their reductions. A row is owned by `threads_per_row` neighbouring threads,
// a power of two: part of a warp, one warp, or several whole warps of the block. Within a warp shuffles are enough; across
// warps each sum is one exchange through shared memory with one barrier: two buffers used in turn make the second barrier
// needless, because a thread can only reach the buffer again after the other's barrier.
#pragma once
#include "gpu/platform.h"

namespace liger::gpu {

struct RowGroup {
  int threads_per_row, index, group, turn = 0;  // index: of this thread in its row; group: which of the block's rows
  // Dynamic shared memory that the reductions take: two buffers of one float per warp (64 warps' worth at most), N values each.
  template <int N = 1> static constexpr int shared_bytes() { return 2 * N * 32 * int(sizeof(float)); }

  LIGER_DEVICE explicit RowGroup(int threads)
      : threads_per_row(threads), index(thread_id() & (threads - 1)), group(thread_id() / threads) {}
  LIGER_DEVICE int rows_per_block() const { return block_threads() / threads_per_row; }

  // Reduces N values at once by `combine(a, b)`; all threads of the block call it together. Fixed order.
  template <int N, class F>
  LIGER_DEVICE void reduce(float (&v)[N], F combine) {
    const int width = threads_per_row < warp_width() ? threads_per_row : warp_width();
#pragma unroll
    for (int i = 0; i < N; ++i)
      for (int mask = width / 2; mask > 0; mask /= 2) v[i] = combine(v[i], shfl_xor(v[i], mask));
    if (threads_per_row <= warp_width()) return;
    Shared<float> buffer = shared<float>(turn * N * 32 * int(sizeof(float)));
    turn ^= 1;
    if (lane_id() == 0)
#pragma unroll
      for (int i = 0; i < N; ++i) buffer[i * 32 + warp_id()] = v[i];
    block_barrier();
    const int warps = threads_per_row / warp_width(), first = group * warps;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float all = buffer[i * 32 + first];
      for (int w = 1; w < warps; ++w) all = combine(all, buffer[i * 32 + first + w]);
      v[i] = all;
    }
  }
  template <int N>
  LIGER_DEVICE void sum(float (&v)[N]) { reduce(v, [](float a, float b) { return a + b; }); }
  LIGER_DEVICE float sum(float v) {
    float one[1] = {v};
    sum(one);
    return one[0];
  }
  LIGER_DEVICE float max(float v) {
    float one[1] = {v};
    reduce(one, [](float a, float b) { return max_nan(a, b); });
    return one[0];
  }
};

}  // namespace liger::gpu
