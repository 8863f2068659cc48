// Divides rows among threads: the columns that a thread owns (Columns), reductions over the threads of a row (RowGroup), and a row's mean
// and variance (held_moments).
#pragma once
#include "gpu/platform.h"

namespace liger::gpu {

// The threads that share one row, and reductions over them. Their number is a power of two: part of a warp, one warp, several whole warps
// of a block, or all threads of a cluster of blocks. (RowWarps in row_warps.h is for any number of whole warps.)
//
// A reduction first combines the lanes of each warp by shuffles. If a row has several warps, each warp then writes its value to shared
// memory and reads the values of all warps ("exchange"): behind one barrier of the block or, in a cluster, from messages that each warp
// sends to all blocks. Successive reductions use two buffers in turn. So a second barrier is not needed: a thread that reaches a buffer for
// the second time has passed the exchange in between, so every other thread has read the buffer's first contents.
//
// Template arguments:
//   Threads      the number of threads of the row in one block, as a compile-time constant; 0: the plan sets it at run time.
//   Clusters     true if a cluster may share the row. A test for it at run time would slow down short rows.
//   RowBarriers  true if each row of the block has its own hardware barrier, so that rows do not wait for each other. NVIDIA's compiler
//                then reserves all 16 barriers for the block, so that at most four blocks fit on a multiprocessor.
template <int Threads, bool Clusters, bool RowBarriers = false> struct BasicRowGroup {
  static constexpr bool whole_warps = Threads >= 64;    // no warp, of up to 64 lanes (CDNA), has threads of two rows
  // index: this thread's number in its row. rows_in_block: the rows of the block. row_in_block: the number of this thread's row among them.
  // turn: the number of reductions so far; its lowest bit selects the buffer.
  int threads_per_row, index, row_in_block, rows_in_block, turn = 0;
  bool entering = false;  // true: other blocks of the cluster may not have started yet
  // Bytes of dynamic shared memory that reductions of up to N values take. First come two mbarriers (platform_cuda.h: counters of the
  // messages that have arrived, one for each buffer), then two buffers of N floats per warp of the block, or of the cluster.
  static constexpr int mbarrier_bytes = 2 * int(sizeof(Mbarrier));
  template <int N = 1> static constexpr int shared_bytes(int cluster = 1) { return launch::reduction_bytes(N, cluster); }

  LIGER_DEVICE explicit BasicRowGroup(int threads) : threads_per_row(threads) {
    if (in_cluster()) {
      use_cluster();
      return;
    }
    if (Threads > 0) threads_per_row = Threads;
    const int shift = highest_bit(threads_per_row);
    index = thread_id() & (threads_per_row - 1);
    row_in_block = thread_id() >> shift;
    rows_in_block = block_threads() >> shift;
  }
  LIGER_DEVICE static bool in_cluster() { return Clusters && cluster_blocks() > 1; }
  LIGER_DEVICE int rows_per_block() const { return rows_in_block; }
  // The number of lanes of a warp that share a row.
  LIGER_DEVICE int lanes() const { return whole_warps || threads_per_row > warp_width() ? warp_width() : threads_per_row; }
  // cluster_index(): the number of this thread's cluster, or block if it has no cluster. cluster_count(): how many the grid has. Each of
  // them processes one row, or several short rows, at a time.
  LIGER_DEVICE int64_t cluster_index() const { return in_cluster() ? block_id() >> highest_bit(cluster_blocks()) : block_id(); }
  LIGER_DEVICE int64_t cluster_count() const { return in_cluster() ? grid_blocks() >> highest_bit(cluster_blocks()) : grid_blocks(); }
  LIGER_DEVICE int64_t first_row() const { return cluster_index() * rows_in_block + row_in_block; }

  // Reduces N values at once. `combine(a, b)` stores the combination of a and b in a, and must be commutative. All threads of the block, or
  // of the cluster, must call reduce() together (with RowBarriers, where the device has them: all threads of the row's warps). All threads
  // of a row end with the same bits. All reductions of a kernel must have the same N, because buffers of different sizes would overlap.
  template <int N, class F> LIGER_DEVICE void reduce(float (&v)[N], F combine) {
    if constexpr (whole_warps) {
      butterfly(v, warp_width(), combine);
    } else {
      butterfly(v, threads_per_row, combine);
      if (threads_per_row <= warp_width()) return;
    }
    post(v);
    collect(v, combine);
  }
  template <int N> LIGER_DEVICE void sum(float (&v)[N]) { reduce(v, added<N>); }
  // sum() in two steps, for rows of several whole warps. Between them the thread may do other work, but no other reduction.
  template <int N> LIGER_DEVICE void begin_sum(float (&v)[N]) {
    static_assert(whole_warps);
    butterfly(v, warp_width(), added<N>);
    post(v);
  }
  template <int N> LIGER_DEVICE void end_sum(float (&v)[N]) { collect(v, added<N>); }
  LIGER_DEVICE float sum(float v) {
    float one[1] = {v};
    sum(one);
    return one[0];
  }
  // A NaN may be dropped: the result of a NaN and a number may be the number.
  LIGER_DEVICE float max(float v) {
    float one[1] = {v};
    reduce(one, [](float (&a)[1], const float (&b)[1]) { a[0] = fmaxf(a[0], b[0]); });
    return one[0];
  }

 private:
  template <int N> LIGER_DEVICE static void added(float (&a)[N], const float (&b)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] += b[i];
  }
  LIGER_DEVICE void use_cluster() {
    index = cluster_rank() * block_threads() + thread_id();
    row_in_block = 0;
    rows_in_block = 1;
    entering = true;
    if (thread_id() == 0) {
      init_mbarrier(shared<Mbarrier>(0));
      init_mbarrier(shared<Mbarrier>(0) + 1);
    }
    cluster_arrive();
  }
  // The first step of an exchange between the warps of a row: writes this warp's values to shared memory or, in a cluster, sends them.
  template <int N> LIGER_DEVICE void post(const float (&v)[N]) {
    if (in_cluster()) return post_in_cluster(v);
    const Shared<float> buffer = shared<float>(mbarrier_bytes + (turn & 1) * N * 32 * int(sizeof(float)));
    if (lane_id() == 0)
#pragma unroll
      for (int i = 0; i < N; ++i) buffer[i * 32 + warp_id()] = v[i];
  }
  // The second step: waits for the values of all warps of the row, and combines them.
  template <int N, class F> LIGER_DEVICE void collect(float (&v)[N], F combine) {
    if (in_cluster()) collect_in_cluster(v, combine);
    else collect_in_block(v, combine);
    ++turn;
  }
  template <int N, class F> LIGER_DEVICE void collect_in_block(float (&v)[N], F combine) {
    const int warps = (Threads > 0 ? Threads : threads_per_row) / warp_width();
    const Shared<float> buffer = shared<float>(mbarrier_bytes + (turn & 1) * N * 32 * int(sizeof(float)));
    if (!RowBarriers || rows_in_block == 1) block_barrier();
    else group_barrier(row_in_block, threads_per_row);
    const int at = row_in_block * warps + (lane_id() & (warps - 1));
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = buffer[i * 32 + at];
    butterfly(v, warps, combine);
  }
  // In a cluster: the buffer of the current turn, which has 32 floats for each block and value.
  template <int N> LIGER_DEVICE Shared<float> cluster_buffer() const {
    return shared<float>(mbarrier_bytes + (turn & 1) * N * 32 * cluster_blocks() * int(sizeof(float)));
  }
  template <int N> LIGER_DEVICE void post_in_cluster(const float (&v)[N]) {
    const int warps = threads_per_row / warp_width(), cluster = cluster_blocks(), pitch = 32 * cluster;
    const Shared<float> buffer = cluster_buffer<N>();
    const Shared<Mbarrier> mbarrier = shared<Mbarrier>(0) + (turn & 1);
    if (entering) cluster_wait();
    entering = false;
    if (thread_id() == 0) expect_bytes(mbarrier, warps * N * int(sizeof(float)));
    if (lane_id() < cluster)
#pragma unroll
      for (int i = 0; i < N; ++i) send(&buffer[i * pitch + index / warp_width()], mbarrier, lane_id(), v[i]);
  }
  template <int N, class F> LIGER_DEVICE void collect_in_cluster(float (&v)[N], F combine) {
    const int warps = threads_per_row / warp_width(), pitch = 32 * cluster_blocks();
    const Shared<float> buffer = cluster_buffer<N>();
    wait_for_phase(shared<Mbarrier>(0) + (turn & 1), turn / 2 & 1);
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
  // Combines the values of the lanes of a warp, or of each group of `width` neighbouring lanes.
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
    } else if constexpr (Threads > 0 && !whole_warps) {
#pragma unroll
      for (int mask = Threads / 2; mask > 0; mask /= 2) step(mask);
    } else {
      for_masks_below(width, step);
    }
  }
};
using RowGroup = BasicRowGroup<0, false>;

// Returns the number of elements before a row's first vector, which starts at the first multiple of 16 bytes; 0 for vectors of one element.
template <int VEC, class T> LIGER_DEVICE int unaligned_head(const T* row, int64_t cols) {
  if constexpr (VEC == 1) return 0;
  const int head = int(-reinterpret_cast<intptr_t>(row) & 15) / int(sizeof(T));
  return head < cols ? head : int(cols);
}
// Splits a row that may start at any address and have any length below 2^31: a `head` of single elements up to the first aligned address,
// whole vectors of N elements, and less than a vector of single elements. Each single element has a thread of its own, and there are at
// most 2 * (N - 1) of them.
template <int N> struct RowParts {
  int head, vectors, single;  // single: the column of this thread's single element, or -1

  LIGER_DEVICE RowParts(int64_t cols, int head, int index) : head(head), vectors(int((cols - head) / N)) {
    const int column = index < head ? index : vectors * N + index;
    single = N > 1 && column < cols ? column : -1;
  }
};
static_assert(launch::min_edge_threads >= 2 * (8 - 1));

// The columns of a row that this thread owns: K vectors of VEC elements. Vector k starts at column first + k * step, so that neighbouring
// threads access neighbouring vectors. Vectors past the end of the range are read as zeros and not stored. A thread whose row lies past the
// last one mostly has an empty range.
// Functions that take the dtype at run time require vectors of at most 16 bytes: VEC is 8 only for 16-bit types, and 4 or 1 for fp32.
template <int VEC, int K> struct Columns {
  int64_t first;
  int step, left;

  LIGER_DEVICE Columns(int index, int threads, int64_t begin, int64_t end)
      : first(begin + int64_t{index} * VEC),
        step(threads * VEC),
        left(end <= first             ? 0
             : end - first > K * step ? K * step
                                      : int(end - first)) {}
  // For a whole row of `cols` columns that the registers of its threads hold: 32-bit arithmetic is enough.
  LIGER_DEVICE Columns(int index, int threads, int cols) : first(index * VEC), step(threads * VEC), left(cols - index * VEC) {}
  LIGER_DEVICE bool has(int k) const { return k * step < left; }
  // The N vectors from vector k on.
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

  // Issues all K loads before it uses the first value. Vectors past the end become zeros.
  template <Hint H = Hint::keep, class T> LIGER_DEVICE void load(Packed<T, VEC> (&out)[K], const void* data, int64_t row_offset = 0) const {
    const T* from = opaque(static_cast<const T*>(data) + (row_offset + first));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      out[k] = {};
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

// Stores a vector of VEC numbers if `live`. Eight numbers are two stores of 16 bytes. For global memory two neighbouring lanes swap halves,
// so that each store writes whole sectors of 32 bytes, which is faster (docs/measurements.md). All lanes call this together.
template <bool Global, int VEC> LIGER_DEVICE void store_floats(float* to, const float (&values)[VEC], bool live) {
  if constexpr (Global && VEC == 8) {
    const bool odd = lane_id() & 1, other_live = shfl_xor(int(live), 1);
    Vec<float, 4> even_half, odd_half;  // this lane's half of the even lane's vector, and of the odd lane's
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = shfl_xor(odd ? values[i] : values[4 + i], 1);
      even_half[i] = odd ? other : values[i];
      odd_half[i] = odd ? values[4 + i] : other;
    }
    float* const even_to = odd ? to - 4 : to;
    if (odd ? other_live : live) gpu::store(even_to, even_half);
    if (odd ? live : other_live) gpu::store(even_to + 8, odd_half);
  } else if (live) {
    gpu::store(to, reinterpret_cast<const Vec<float, VEC>&>(values));
  }
}

// The mean of a vector's elements; exact if all of them are equal.
template <class T, int VEC> LIGER_DEVICE float vector_mean(const Packed<T, VEC>& values) {
  if constexpr (VEC == 1) return values[0];
  float mean = 0;
#pragma unroll
  for (int i = 0; i < VEC / 2; ++i) mean += (values[i] + values[i + VEC / 2]) * (1.0f / VEC);
  return mean;
}
// Computes mean and variance of a row that its threads hold in registers, by one or two passes over the row, with one exchange each. At the
// call `mean` is an estimate: one of the row's values, or the mean of some. Sums are relative to the estimate. If the estimate is so far
// from the row's mean that the variance has lost digits by cancellation, a second pass follows, relative to the mean that the first pass
// found. Rows that share a block share its barrier, so all of them take the same number of passes: one if they have 16 bits and at most
// 8,192 columns, where the loss of digits is too small to matter, and two otherwise. AlwaysTwice: every row takes two passes.
// for_each(f) calls f(x) for each vector x of the thread. `a` has the row's cols and inverse_cols.
template <class T, int VEC, bool AlwaysTwice = false, class Group, class Each, class Args>
LIGER_DEVICE void held_moments(Group& group, Each for_each, const Args& a, float& mean, float& variance) {
  // The limit of (mean - estimate)^2 / variance above which too many digits are lost. For fp32 2.25 was too much: the error was larger than
  // PyTorch's.
  constexpr float cancellation_limit = sizeof(T) == 2 ? 256 : 1;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    float sums[2] = {};
    for_each([&](const Packed<T, VEC>& x) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float deviation = x[i] - mean;
        sums[0] += deviation;
        sums[1] += deviation * deviation;
      }
    });
    group.sum(sums);
    const float shift = sums[0] * a.inverse_cols;
    mean += shift;
    variance = sums[1] * a.inverse_cols - shift * shift;
    if (AlwaysTwice) continue;
    if (group.rows_per_block() == 1 ? !(shift * shift > cancellation_limit * variance) : sizeof(T) == 2 && a.cols <= 8192) break;
  }
  if (variance < 0) variance = 0;  // by rounding; NaN stays
}
// The same for vectors in an array.
template <bool AlwaysTwice = false, class T, int VEC, int K, class Group, class Args>
LIGER_DEVICE void held_moments(Group& group, const Columns<VEC, K>& columns, const Packed<T, VEC> (&x)[K], const Args& a, float& mean,
                               float& variance) {
  const auto for_each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k)) f(x[k]);
  };
  held_moments<T, VEC, AlwaysTwice>(group, for_each, a, mean, variance);
}

}  // namespace liger::gpu
