// Rows over threads: which columns of a row a thread owns (Columns), and reductions over the threads of a row (RowGroup).
#pragma once
#include "gpu/platform.h"

namespace liger::gpu {

// The threads that share one row: a power of two; part of a warp, one warp, or several whole warps of the block. Within a warp
// shuffles are enough; across warps each reduction is one exchange through shared memory with one barrier: two buffers used in
// turn make the second barrier needless, because a thread can only reach a buffer again after the other one's barrier.
struct RowGroup {
  int threads_per_row, index, group, groups, turn = 0;  // index: of this thread in its row; group: which of the block's rows
  // Dynamic shared memory that reductions of up to N values take: two buffers of one float per warp, 32 warps at most.
  template <int N = 1> static constexpr int shared_bytes() { return 2 * N * 32 * int(sizeof(float)); }

  LIGER_DEVICE explicit RowGroup(int threads)
      : threads_per_row(threads), index(thread_id() & (threads - 1)), group(thread_id() / threads), groups(block_threads() / threads) {}
  // All of a block whose size the compiler knows.
  template <int Threads>
  LIGER_DEVICE static RowGroup whole_block() {
    RowGroup all(Threads);
    all.group = 0;
    all.groups = 1;
    return all;
  }
  LIGER_DEVICE int rows_per_block() const { return groups; }

  // Reduces N values at once by `combine(a, b)`, which commutes; all threads of the block call it together, all get the same
  // bits. Reductions of one kernel must not mix different N: their buffers would overlap.
  template <int N, class F>
  LIGER_DEVICE void reduce(float (&v)[N], F combine) {
    butterfly(v, threads_per_row < warp_width() ? threads_per_row : warp_width(), combine);
    if (threads_per_row <= warp_width()) return;
    Shared<float> buffer = shared<float>(turn * N * 32 * int(sizeof(float)));
    turn ^= 1;
    if (lane_id() == 0)
#pragma unroll
      for (int i = 0; i < N; ++i) buffer[i * 32 + warp_id()] = v[i];
    block_barrier();
    const int warps = threads_per_row / warp_width(), mine = group * warps + (lane_id() & (warps - 1));
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = buffer[i * 32 + mine];
    butterfly(v, warps, combine);
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

 private:
  template <int N, class F>
  LIGER_DEVICE static void butterfly(float (&v)[N], int width, F combine) {
    for (int mask = width / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = combine(v[i], shfl_xor(v[i], mask));
  }
};

// This thread's K vectors of a range of columns: vector k starts at first + k * step, so that neighbouring threads touch
// neighbouring vectors. Vectors past the end read as zeros and are not stored; a row past the last one has an empty range.
// Where the dtype is a run-time one, 8 elements are 16 bytes of a 16-bit type: fp32 rows come in vectors of 4 (or single elements).
template <int VEC, int K>
struct Columns {
  int64_t first;
  int step, left;

  LIGER_DEVICE Columns(int index, int threads, int64_t begin, int64_t end)
      : first(begin + int64_t{index} * VEC), step(threads * VEC), left(end <= first ? 0 : end - first > K * step ? K * step : int(end - first)) {}
  LIGER_DEVICE bool has(int k) const { return k * step < left; }
  template <class F>
  LIGER_DEVICE static void with_row_dtype(Dtype dtype, F&& f) {
    if constexpr (VEC < 8) with_dtype(dtype, f);
    else if (dtype == Dtype::bf16) f(bf16{});
    else f(f16{});
  }

  // All K loads are issued before the first use.
  template <Hint H = Hint::keep, class T>
  LIGER_DEVICE void load(Packed<T, VEC> (&out)[K], const void* data, int64_t row_offset = 0) const {
    const T* from = static_cast<const T*>(data) + (row_offset + first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      out[k] = {};
      if (has(k)) gpu::load<H>(out[k], from + k * step);
    }
  }
  template <Hint H = Hint::keep>
  LIGER_DEVICE void load(float (&out)[K][VEC], const void* data, Dtype dtype, int64_t row_offset = 0) const {
    with_row_dtype(dtype, [&](auto tag) {
      Packed<decltype(tag), VEC> raw[K];
      load<H>(raw, data, row_offset);
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int i = 0; i < VEC; ++i) out[k][i] = raw[k][i];
    });
  }
  template <Hint H = Hint::keep, class T>
  LIGER_DEVICE void store(const Packed<T, VEC> (&in)[K], void* data, int64_t row_offset = 0) const {
    T* to = static_cast<T*>(data) + (row_offset + first);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (has(k)) gpu::store<H>(to + k * step, in[k]);
  }
  template <Hint H = Hint::keep>
  LIGER_DEVICE void store(const float (&in)[K][VEC], void* data, Dtype dtype, int64_t row_offset = 0) const {
    with_row_dtype(dtype, [&](auto tag) {
      Packed<decltype(tag), VEC> raw[K];
#pragma unroll
      for (int k = 0; k < K; ++k) raw[k].set(in[k]);
      store<H>(raw, data, row_offset);
    });
  }
};

}  // namespace liger::gpu
