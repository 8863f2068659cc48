// Rows over threads: which columns of a row a thread owns (Columns), reductions over the threads of a row (RowGroup), and a row's mean and
// variance.
#pragma once
#include "gpu/platform.h"

namespace liger::gpu {

// The threads that share one row: a power of two; part of a warp, one warp, several whole warps of the block, or all blocks of a
// cluster. Within a warp shuffles are enough; across warps each reduction is one exchange of the warps' values, with one barrier, or
// by messages that each warp sends to all blocks of the cluster. Two buffers used in turn make a second barrier needless, because a
// thread can only reach a buffer again after all others have passed the exchange between, and so have read it.
// Threads: so many, or all of a cluster of blocks of so many; 0: as the plan says. Clusters: it may be a cluster; asking costs short
// rows 2 % of their time. OwnBarriers: a block's rows do not wait for each other; NVIDIA's compiler then keeps all 16 barriers for a
// block, and no more than four blocks fit on a multiprocessor.
template <int Threads, bool Clusters, bool OwnBarriers = false> struct RowGroupOf {
  static constexpr bool whole_warps = Threads >= 64;    // for certain
  int threads_per_row, index, group, groups, turn = 0;  // index: of this thread in its row; group: which of the block's rows
  bool entering = false;                                // the cluster's other blocks may not have started yet
  // Dynamic shared memory that reductions of up to N values take: two buffers of one float per warp of the block, or of the row,
  // behind two inboxes.
  static constexpr int inbox_bytes = 2 * int(sizeof(Inbox));
  template <int N = 1> static constexpr int shared_bytes(int cluster = 1) { return launch::reduction_bytes(N, cluster); }

  LIGER_DEVICE explicit RowGroupOf(int threads) : threads_per_row(threads) {
    if (in_cluster()) {
      use_cluster();
      return;
    }
    if (Threads > 0) threads_per_row = Threads;
    const int shift = log2_of(threads_per_row);
    index = thread_id() & (threads_per_row - 1);
    group = thread_id() >> shift;
    groups = block_threads() >> shift;
  }
  LIGER_DEVICE static bool in_cluster() { return Clusters && cluster_blocks() > 1; }
  LIGER_DEVICE int rows_per_block() const { return groups; }
  // Of a warp, those that share a row.
  LIGER_DEVICE int lanes() const { return whole_warps || threads_per_row > warp_width() ? warp_width() : threads_per_row; }
  // What the threads of a row are one of: a block, or a cluster.
  LIGER_DEVICE int64_t team() const { return in_cluster() ? block_id() >> log2_of(cluster_blocks()) : block_id(); }
  LIGER_DEVICE int64_t teams() const { return in_cluster() ? grid_blocks() >> log2_of(cluster_blocks()) : grid_blocks(); }
  LIGER_DEVICE int64_t first_row() const { return team() * groups + group; }

  // Reduces N values at once by `combine(a, b)`: a becomes what a and b are together, of either order the same. All threads of the
  // block, or cluster, call it together (the row's alone, if they have barriers of their own), all get the same bits. Reductions of one
  // kernel must not mix different N: their buffers would overlap.
  template <int N, class F> LIGER_DEVICE void reduce(float (&v)[N], F combine) {
    if constexpr (whole_warps) {
      butterfly(v, warp_width(), combine);
    } else {
      butterfly(v, threads_per_row, combine);
      if (threads_per_row <= warp_width()) return;
    }
    if (in_cluster()) exchange_in_cluster(v, combine);
    else exchange(v, combine);
    ++turn;
  }
  template <int N> LIGER_DEVICE void sum(float (&v)[N]) {
    reduce(v, [](float (&a)[N], const float (&b)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) a[i] += b[i];
    });
  }
  LIGER_DEVICE float sum(float v) {
    float one[1] = {v};
    sum(one);
    return one[0];
  }
  // A NaN may be dropped.
  LIGER_DEVICE float max(float v) {
    float one[1] = {v};
    reduce(one, [](float (&a)[1], const float (&b)[1]) { a[0] = fmaxf(a[0], b[0]); });
    return one[0];
  }

 private:
  LIGER_DEVICE void use_cluster() {
    index = cluster_rank() * block_threads() + thread_id();
    group = 0;
    groups = 1;
    entering = true;
    if (thread_id() == 0) {
      open_inbox(shared<Inbox>(0));
      open_inbox(shared<Inbox>(0) + 1);
    }
    cluster_arrive();
  }
  // The warps' values, between the warps of a row.
  template <int N, class F> LIGER_DEVICE void exchange(float (&v)[N], F combine) {
    const int warps = (Threads > 0 ? Threads : threads_per_row) / warp_width();
    const Shared<float> buffer = shared<float>(inbox_bytes + (turn & 1) * N * 32 * int(sizeof(float)));
    if (lane_id() == 0)
#pragma unroll
      for (int i = 0; i < N; ++i) buffer[i * 32 + warp_id()] = v[i];
    if (!OwnBarriers || groups == 1) block_barrier();
    else group_barrier(group, threads_per_row);
    const int at = group * warps + (lane_id() & (warps - 1));
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = buffer[i * 32 + at];
    butterfly(v, warps, combine);
  }
  template <int N, class F> LIGER_DEVICE void exchange_in_cluster(float (&v)[N], F combine) {
    const int warps = threads_per_row / warp_width(), cluster = cluster_blocks(), pitch = 32 * cluster, buffer_index = turn & 1;
    const Shared<float> buffer = shared<float>(inbox_bytes + buffer_index * N * pitch * int(sizeof(float)));
    const Shared<Inbox> inbox = shared<Inbox>(0) + buffer_index;
    if (entering) cluster_wait();
    entering = false;
    if (thread_id() == 0) expect_bytes(inbox, warps * N * int(sizeof(float)));
    if (lane_id() < cluster)
#pragma unroll
      for (int i = 0; i < N; ++i) send(&buffer[i * pitch + index / warp_width()], inbox, lane_id(), v[i]);
    wait_for_round(inbox, turn / 2 & 1);
    const int at = lane_id() & (warps - 1);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = buffer[i * pitch + at];
#pragma unroll 1
    for (int more = at + warp_width(); more < warps; more += warp_width()) {
      float other[N];
#pragma unroll
      for (int i = 0; i < N; ++i) other[i] = buffer[i * pitch + more];
      combine(v, other);
    }
    butterfly(v, warps, combine);
  }
  // Over the lanes of a warp, or over groups of `width` of them.
  template <int N, class F> LIGER_DEVICE static void butterfly(float (&v)[N], int width, F combine) {
    const auto step = [&](int mask) {
      float other[N];
#pragma unroll
      for (int i = 0; i < N; ++i) other[i] = shfl_xor(v[i], mask);
      combine(v, other);
    };
    if (width >= warp_width()) {
#pragma unroll
      for (int mask = warp_width() / 2; mask > 0; mask /= 2) step(mask);
    } else {
#pragma unroll 1
      for (int mask = width / 2; mask > 0; mask /= 2) step(mask);
    }
  }
};
using RowGroup = RowGroupOf<0, false>;

// A maximum and the sum of exponentials relative to it, the first two of a's and of b's values: a's become those of both together, of
// either order the same. exp_as of T.
template <class T, int N> LIGER_DEVICE void join_exponentials(float (&a)[N], const float (&b)[N]) {
  const float smaller = exp_as<T>(a[0] == b[0] ? 0 : -fabsf(a[0] - b[0]));
  a[1] = a[0] >= b[0] ? a[1] + b[1] * smaller : a[1] * smaller + b[1];
  a[0] = fmaxf(a[0], b[0]);
}

// This thread's K vectors of a range of columns: vector k starts at first + k * step, so that neighbouring threads touch
// neighbouring vectors. Vectors past the end read as zeros and are not stored; a row past the last one has an empty range.
// Where the dtype is a run-time one, 8 elements are 16 bytes of a 16-bit type: fp32 rows come in vectors of 4 (or single elements).
template <int VEC, int K> struct Columns {
  int64_t first;
  int step, left;

  LIGER_DEVICE Columns(int index, int threads, int64_t begin, int64_t end)
      : first(begin + int64_t{index} * VEC),
        step(threads * VEC),
        left(end <= first             ? 0
             : end - first > K * step ? K * step
                                      : int(end - first)) {}
  // Of a row that its threads hold.
  LIGER_DEVICE Columns(int index, int threads, int cols) : first(index * VEC), step(threads * VEC), left(cols - index * VEC) {}
  LIGER_DEVICE bool has(int k) const { return k * step < left; }
  // N of its vectors, from the kth on.
  template <int N> LIGER_DEVICE Columns<VEC, N> from(int k) const {
    Columns<VEC, N> some(0, 0, 0);
    some.first = first + k * step;
    some.step = step;
    some.left = left - k * step;
    return some;
  }
  template <class F> LIGER_DEVICE static void with_row_dtype(Dtype dtype, F&& f) {
    if constexpr (VEC < 8) with_dtype(dtype, f);
    else if (dtype == Dtype::bf16) f(bf16{});
    else f(f16{});
  }

  // All K loads are issued before the first use. `missing`: what stands for a vector past the end.
  template <Hint H = Hint::keep, class T>
  LIGER_DEVICE void load(Packed<T, VEC> (&out)[K], const void* data, int64_t row_offset = 0, Packed<T, VEC> missing = {}) const {
    const T* from = opaque(static_cast<const T*>(data) + (row_offset + first));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      out[k] = missing;
      if (has(k)) gpu::load<H>(out[k], from + k * step);
    }
  }
  template <Hint H = Hint::keep> LIGER_DEVICE void load(float (&out)[K][VEC], const void* data, Dtype dtype, int64_t row_offset = 0) const {
    with_row_dtype(dtype, [&](auto tag) {
      Packed<decltype(tag), VEC> raw[K];
      load<H>(raw, data, row_offset);
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int i = 0; i < VEC; ++i) out[k][i] = raw[k][i];
    });
  }
  template <Hint H = Hint::keep, class T> LIGER_DEVICE void store(const Packed<T, VEC> (&in)[K], void* data, int64_t row_offset = 0) const {
    T* to = opaque(static_cast<T*>(data) + (row_offset + first));
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (has(k)) gpu::store<H>(to + k * step, in[k]);
  }
  template <Hint H = Hint::keep> LIGER_DEVICE void store(const float (&in)[K][VEC], void* data, Dtype dtype, int64_t row_offset = 0) const {
    with_row_dtype(dtype, [&](auto tag) {
      Packed<decltype(tag), VEC> raw[K];
#pragma unroll
      for (int k = 0; k < K; ++k) raw[k].set(in[k]);
      store<H>(raw, data, row_offset);
    });
  }
};

// Exact where all values are the same.
template <class T, int VEC> LIGER_DEVICE float mean_of(const Packed<T, VEC>& values) {
  if constexpr (VEC == 1) return values[0];
  float mean = 0;
#pragma unroll
  for (int i = 0; i < VEC / 2; ++i) mean += (values[i] + values[i + VEC / 2]) * (1.0f / VEC);
  return mean;
}
// Mean and variance of a row that its threads hold, in one pass and one exchange: relative to `mean` as it is given, one of the row's
// values or a mean of some; and where that is so far from the others that the variance would have lost digits, once more, relative to the
// mean that was found. Rows that share a block have one barrier for all and decide together: a 16-bit row of up to 8,192 columns cannot
// lose so many digits that it matters. Twice: in any case. `a` has the row's cols and inverse_cols.
template <bool Twice = false, class T, int VEC, int K, class Group, class Args>
LIGER_DEVICE void held_moments(Group& group, const Columns<VEC, K>& columns, const Packed<T, VEC> (&x)[K], const Args& a, float& mean,
                               float& variance) {
  constexpr float far = sizeof(T) == 2 ? 256 : 4;  // squared, in variances
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    float sums[2] = {};
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k))
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float from_it = x[k][i] - mean;
          sums[0] += from_it;
          sums[1] += from_it * from_it;
        }
    group.sum(sums);
    const float off = sums[0] * a.inverse_cols;
    mean += off;
    variance = sums[1] * a.inverse_cols - off * off;
    if (Twice) continue;
    if (group.rows_per_block() == 1 ? !(off * off > far * variance) : sizeof(T) == 2 && a.cols <= 8192) break;
  }
  if (variance < 0) variance = 0;  // NaN stays
}

// Elementwise work in tiles of K vectors a thread: a block's threads have a tile of one row, or of a few short rows.
template <int K> struct Tiles {
  int threads_per_row;
  int64_t rows, cols, tiles_per_row;

  explicit Tiles(const launch::Launch& made)
      : threads_per_row(made.plan.threads_per_row),
        rows(made.rows),
        cols(made.cols),
        tiles_per_row(launch::ceil_div(cols, int64_t{threads_per_row} * K * made.instance.vec)) {}
  // This thread's columns, of a row past the last one none.
  template <int VEC> LIGER_DEVICE Columns<VEC, K> columns(int64_t& row) const {
    const int64_t line = quotient(block_id(), tiles_per_row), tile = block_id() - line * tiles_per_row;
    row = line * (block_threads() / threads_per_row) + thread_id() / threads_per_row;
    return {thread_id() & (threads_per_row - 1), threads_per_row, tile * threads_per_row * K * VEC, row < rows ? cols : 0};
  }
};

}  // namespace liger::gpu
