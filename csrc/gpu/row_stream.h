// The rows that a thread works on, one after another, fetched before they are needed: RowStream.
//
// There are three implementations with the same interface:
// - RingStream, where the hardware has bulk copies (Hopper and later). Each warp has a ring buffer of rows in shared memory, of its own
// columns.
//   One lane requests rows; when the warp has loaded a row into registers, it requests another one in its place. So loads are in flight
//   during reductions, exponentials and stores, without taking registers or needing a barrier of the block. On an H200 a copy through such
//   rings is as fast as the best plain copy if a request has at least 512 bytes; with rings of whole blocks, or by cp.async, it is 2 to 6 %
//   slower.
// - AsyncStream, where there are asynchronous copies (Ampere, Ada). Each thread has a ring of its own vectors, which no other thread reads.
// - RegisterStream, elsewhere: the next row is loaded into registers while this one is processed.
#pragma once
#include "gpu/rows.h"

namespace liger::gpu {

// The vectors of a row that belong to a warp: `begin` to `end`. They are contiguous, so that one copy brings them, and each warp of the row
// has the same number, in whole lines of 128 bytes (the last ones may have fewer).
struct WarpShare {
  int lane, lanes;  // this thread's number among the lanes of its warp that share the row, and how many these are
  int64_t begin, end;

  template <class Group> LIGER_DEVICE WarpShare(const Group& group, int64_t vectors) : lanes(group.lanes()) {
    lane = group.index & (lanes - 1);
    const int warps = group.threads_per_row / lanes, warp = uniform(group.index / lanes);
    const int64_t share = (quotient(vectors + warps - 1, warps) + 7) & ~7;
    begin = warp * share < vectors ? warp * share : vectors;
    end = begin + share < vectors ? begin + share : vectors;
  }
};
// This thread's vectors among them, at most K.
template <int VEC, int K, class Group> LIGER_DEVICE Columns<VEC, K> warp_columns(const Group& group, int64_t cols) {
  const WarpShare share(group, VEC == 1 ? cols : cols / VEC);
  return {share.lane, share.lanes, share.begin * VEC, share.end * VEC};
}

// The rows first, first + step, first + 2 * step, ... below `rows`, of N tensors of one dtype.
template <int N> struct RowSteps {
  int64_t first, step, rows, cols;
  Rows tensors[N];
};

// In all three implementations, take(out) gives this thread's vectors of the next row, and zeros past the last column. Vectors of a row
// past the last one are not set. release() makes room for another row in its place. All lanes of a warp call them together.

// A warp's ring buffer: its vectors of `stages` rows in shared memory, [stages][N][K * lanes of a warp].
template <class Group, class T, int VEC, int K, int N> class RingStream {
  static constexpr int vector_bytes = VEC * int(sizeof(T)), tensor_bytes = K * warp_width() * vector_bytes, stage_bytes = N * tensor_bytes;
  unsigned char *ring, *mine;  // the warp's buffer, and this thread's first vector in it
  Mbarrier* mbarriers;  // one per stage: a counter of the bytes that have arrived (platform_cuda.h)
  const unsigned char* at[N];  // the warp's columns of the row that is requested next
  int64_t pitch[N];  // bytes between neighbouring rows
  int64_t asking, step, rows;  // asking: the number of the row that is requested next
  int stages, stage = 0, parity = 0, lanes, bytes;

 public:
  LIGER_DEVICE RingStream(const Group& group, const RowSteps<N>& steps, int stages, int shared_offset)
      : step(steps.step), rows(steps.rows), stages(stages), lanes(group.lanes()) {
    const WarpShare share(group, steps.cols / VEC);
    const int warp = uniform(warp_id()), row_of_warp = lane_id() / lanes;
    asking = uniform(steps.first - row_of_warp);
    bytes = uniform(int(share.end - share.begin)) * vector_bytes;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      pitch[n] = steps.tensors[n].stride * int64_t(sizeof(T));
      at[n] = static_cast<const unsigned char*>(steps.tensors[n].data) + (asking * pitch[n] + uniform(share.begin) * vector_bytes);
    }
    ring = shared<unsigned char>(shared_offset) + warp * stages * stage_bytes;
    mine = ring + (row_of_warp * lanes * K + share.lane) * vector_bytes;
    mbarriers = shared<Mbarrier>(shared_offset + block_threads() / warp_width() * stages * stage_bytes) + warp * stages;
    // Columns past the last one are written by no copy, nor are rows past the last one where a warp has several: they are set to zero once.
    for (int s = 0; s < stages; ++s)
      for (int n = 0; n < N; ++n)
        for (int k = 0; k < K; ++k)
          if ((k * lanes + share.lane) * vector_bytes >= bytes || (!Group::whole_warps && steps.first + s * step >= rows))
            store(reinterpret_cast<T*>(mine + s * stage_bytes + n * tensor_bytes + k * lanes * vector_bytes), Packed<T, VEC>{});
    if (elected())
      for (int s = 0; s < stages; ++s) init_mbarrier(mbarriers + s);
    warp_barrier();
    for (int s = 0; s < stages; ++s) request(s);
  }
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
    wait_for_phase(mbarriers + stage, parity);
    const unsigned char* const from = mine + stage * stage_bytes;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) load(out[n][k], reinterpret_cast<const T*>(from + n * tensor_bytes + k * lanes * vector_bytes));
  }
  LIGER_DEVICE void release() {
    finish_reads_before_copies();
    warp_barrier();  // of all lanes
    request(stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }

 private:
  // Requests the next row, or those of all groups of lanes, into stage s.
  LIGER_DEVICE void request(int s) {
    // A warp may wait for a row past the last one, if other rows of its block are not past it: then nothing is copied, but announced.
    const int64_t left = rows - asking;
    const int warp_rows = warp_width() / lanes, live = left <= 0 || bytes == 0 ? 0 : left < warp_rows ? int(left) : warp_rows;
    if (elected()) {
      unsigned char* const to = ring + s * stage_bytes;
      expect_bytes(mbarriers + s, live * bytes * N);
#pragma unroll 1
      for (int row = 0; row < live; ++row)
#pragma unroll
        for (int n = 0; n < N; ++n)
          bulk_copy(to + n * tensor_bytes + row * lanes * K * vector_bytes, at[n] + row * pitch[n], bytes, mbarriers + s);
    }
    asking += step;
#pragma unroll
    for (int n = 0; n < N; ++n) at[n] += step * pitch[n];
  }
};

template <class Group, class T, int VEC, int K, int N> class AsyncStream {
  static constexpr int vector_bytes = VEC * int(sizeof(T));
  unsigned char* ring;  // this thread's place in [stages][N][K][threads of the block] vectors
  const T* at[N];  // this thread's columns of the row that is requested next
  int64_t jump[N], asking, step, rows;
  Columns<VEC, K> columns;
  int stages, stage = 0;

 public:
  LIGER_DEVICE AsyncStream(const Group& group, const RowSteps<N>& steps, int stages, int shared_offset)
      : asking(steps.first), step(steps.step), rows(steps.rows), columns(warp_columns<VEC, K>(group, steps.cols)), stages(stages) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Rows& tensor = steps.tensors[n];
      at[n] = static_cast<const T*>(tensor.data) + (steps.first * tensor.stride + columns.first);
      jump[n] = steps.step * tensor.stride;
    }
    ring = shared<unsigned char>(shared_offset) + thread_id() * vector_bytes;
    for (int s = 0; s < stages; ++s) {
      if (asking >= rows) clear(s);
      request(s);
    }
  }
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
    wait_for_copies(stages - 1);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        out[n][k] = {};
        if (columns.has(k)) load(out[n][k], reinterpret_cast<const T*>(place(stage, n, k)));
      }
    request(stage);
    if (++stage == stages) stage = 0;
  }
  LIGER_DEVICE void release() {}

 private:
  // The row is past the last one, and no copy brings it.
  LIGER_DEVICE void clear(int s) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) store(reinterpret_cast<T*>(place(s, n, k)), Packed<T, VEC>{});
  }
  LIGER_DEVICE unsigned char* place(int s, int n, int k) const { return ring + ((s * N + n) * K + k) * block_threads() * vector_bytes; }
  // Each call closes one group of copies, even past the last row, because wait_for_copies() counts groups.
  LIGER_DEVICE void request(int s) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (asking < rows && columns.has(k)) async_copy(place(s, n, k), at[n] + k * columns.step);
      at[n] += jump[n];
    }
    close_copies();
    asking += step;
  }
};

// The first `Ahead` tensors are loaded one row ahead, the others when the row is taken.
template <class Group, class T, int VEC, int K, int N, int Ahead> class RegisterStream {
  const T* at[N];  // the row to fetch next
  int64_t jump[N], taking, step, rows;
  Columns<VEC, K> columns;
  Packed<T, VEC> next[N][K];

 public:
  LIGER_DEVICE RegisterStream(const Group& group, const RowSteps<N>& steps, int, int)
      : taking(steps.first), step(steps.step), rows(steps.rows), columns(warp_columns<VEC, K>(group, steps.cols)) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Rows& tensor = steps.tensors[n];
      at[n] = static_cast<const T*>(tensor.data) + (steps.first * tensor.stride + columns.first);
      jump[n] = steps.step * tensor.stride;
    }
    fetch<0, Ahead>(next, taking);
  }
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
#pragma unroll
    for (int n = 0; n < Ahead; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) out[n][k] = next[n][k];
    fetch<Ahead, N>(out, taking);
    taking += step;
    fetch<0, Ahead>(next, taking);
  }
  LIGER_DEVICE void release() {}

 private:
  template <int From, int To> LIGER_DEVICE void fetch(Packed<T, VEC> (&out)[N][K], int64_t row) {
#pragma unroll
    for (int n = From; n < To; ++n) {
      const T* const from = opaque(at[n]);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        out[n][k] = {};
        if (row < rows && columns.has(k)) load<Hint::stream>(out[n][k], from + k * columns.step);
      }
      at[n] += jump[n];
    }
  }
};

// The implementation for this device. Rows that are read by single elements (VEC == 1) may be unaligned, which copies to shared memory
// cannot be. Async: whether asynchronous copies are faster for this kernel, where there are any.
template <class Group, class T, int VEC, int K, int N, int Ahead, bool Async>
using RowStream = std::conditional_t<has_bulk_copies && (VEC > 1), RingStream<Group, T, VEC, K, N>,
                                     std::conditional_t<has_async_copies && Async && (VEC > 1), AsyncStream<Group, T, VEC, K, N>,
                                                        RegisterStream<Group, T, VEC, K, N, Ahead>>>;

}  // namespace liger::gpu
