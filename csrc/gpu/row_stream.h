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
// has the same number (the last ones may have fewer).
struct WarpShare {
  int lane, lanes;  // this thread's number among the lanes of its warp that share the row, and how many these are
  int64_t begin, end;

  template <class Group> LIGER_DEVICE WarpShare(const Group& group, int64_t vectors) : lanes(group.lanes()) {
    lane = group.index & (lanes - 1);
    const int warps = group.threads_per_row >> log2_of(lanes), warp = (group.index - lane) >> log2_of(lanes);
    const int64_t share = (vectors + warps - 1) >> log2_of(warps);
    begin = warp * share < vectors ? warp * share : vectors;
    end = begin + share < vectors ? begin + share : vectors;
  }
};
// This thread's vectors among them, at most K.
template <int VEC, int K, class Group> LIGER_DEVICE Columns<VEC, K> warp_columns(const Group& group, int64_t cols) {
  const WarpShare share(group, VEC == 1 ? cols : cols / VEC);
  return {share.lane, share.lanes, share.begin * VEC, share.end * VEC};
}

// The rows first, first + step, first + 2 * step, ... below `rows`, of tensors of one dtype. Rings and streams read N tensors; those from
// number Needed on may be missing (data is null).
struct RowSteps {
  int64_t first, step, rows, cols;
  const Rows* tensors;
};

// A warp's ring buffer: its vectors of `stages` rows in shared memory, at most `vectors` per lane. wait() until the next row is there, read
// it by vector(), then release() it, which requests the row after the last one requested into its place. All lanes of a warp call each of
// these functions together.
template <class Group, class T, int VEC, int N, int Needed = N> class WarpRing {
  static constexpr int vector_bytes = VEC * int(sizeof(T));
  unsigned char *ring, *mine;  // the warp's buffer: [stages][tensors that are not missing][columns]; and this thread's first vector in it
  Inbox* inboxes;  // one per stage: a counter of the bytes that have arrived (platform_cuda.h)
  const unsigned char* at[N];  // the warp's columns of the row that is requested next
  int64_t jump[N], pitch[N];  // bytes from there to the row after it, and between neighbouring rows
  int64_t asking, step, rows;  // asking: the number of the row that is requested next
  int vectors, stages, tensors = 0, stage = 0, parity = 0, lanes, bytes;

 public:
  LIGER_DEVICE WarpRing(const Group& group, const RowSteps& steps, int vectors, int stages, int shared_offset)
      : step(steps.step), rows(steps.rows), vectors(vectors), stages(stages), lanes(group.lanes()) {
    const WarpShare share(group, steps.cols / VEC);
    const int lane = share.lane, warp = uniform(warp_id()), row_of_warp = lane_id() / lanes;
    asking = uniform(steps.first - row_of_warp);
    const int64_t first = uniform(share.begin);
    bytes = uniform(int(share.end - share.begin)) * vector_bytes;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Rows& tensor = steps.tensors[n];
      at[n] = static_cast<const unsigned char*>(tensor.data);
      pitch[n] = tensor.stride * int64_t(sizeof(T));
      jump[n] = steps.step * pitch[n];
      if (tensor.data == nullptr) continue;
      at[n] += asking * pitch[n] + first * vector_bytes;
      ++tensors;
    }
    ring = shared<unsigned char>(shared_offset) + warp * stages * stage_bytes();
    mine = ring + (row_of_warp * lanes * vectors + lane) * vector_bytes;
    inboxes = shared<Inbox>(shared_offset + block_threads() / warp_width() * stages * stage_bytes()) + warp * stages;
    // Columns past the last one are written by no copy: they are set to zero once.
    for (int s = 0; s < stages; ++s)
      for (int n = 0; n < tensors; ++n)
        for (int k = 0; k < vectors; ++k)
          if ((k * lanes + lane) * vector_bytes >= bytes) store(reinterpret_cast<T*>(place(s, n, k)), Packed<T, VEC>{});
    if (elected())
      for (int s = 0; s < stages; ++s) open_inbox(inboxes + s);
    warp_barrier();
  }
  // Requests the next row into stage s: called for each stage at the start, and by release().
  LIGER_DEVICE void ask(int s) {
    const int64_t left = rows - asking;
    const int warp_rows = warp_width() / lanes, live = left <= 0 || bytes == 0 ? 0 : left < warp_rows ? int(left) : warp_rows;
    if (elected()) {
      unsigned char* const to = ring + s * stage_bytes();
      expect_bytes(inboxes + s, live * bytes * tensors);
      const auto copy = [&](int row) {
#pragma unroll
        for (int n = 0; n < N; ++n)
          if (has(n)) bulk_copy(to + n * tensor_bytes() + row * lanes * vectors * vector_bytes, at[n] + row * pitch[n], bytes, inboxes + s);
      };
      if constexpr (Group::whole_warps) {
        if (live) copy(0);
      } else {
#pragma unroll 1
        for (int row = 0; row < live; ++row) copy(row);
      }
    }
    asking += step;
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (has(n)) at[n] += jump[n];
  }
  LIGER_DEVICE void wait() const { wait_for_round(inboxes + stage, parity); }
  LIGER_DEVICE void vector(Packed<T, VEC>& out, int n, int k) const { load(out, reinterpret_cast<const T*>(place(stage, n, k))); }
  LIGER_DEVICE void release() {
    finish_reads_before_copies();
    warp_barrier();  // of all lanes
    ask(stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  LIGER_DEVICE bool has(int n) const { return n < Needed || at[n] != nullptr; }

 private:
  LIGER_DEVICE int tensor_bytes() const { return vectors * warp_width() * vector_bytes; }
  LIGER_DEVICE int stage_bytes() const { return tensors * tensor_bytes(); }
  LIGER_DEVICE unsigned char* place(int s, int n, int k) const {
    return mine + s * stage_bytes() + n * tensor_bytes() + k * lanes * vector_bytes;
  }
};

// In all three implementations, take(out) gives this thread's vectors of the next row, and zeros past the last column. Vectors of a missing
// tensor, or of a row past the last one, are not set. All lanes of a warp call it together.
template <class Group, class T, int VEC, int K, int N, int Needed> class RingStream {
  WarpRing<Group, T, VEC, N, Needed> ring;

 public:
  LIGER_DEVICE RingStream(const Group& group, const RowSteps& steps, int stages, int shared_offset)
      : ring(group, steps, K, stages, shared_offset) {
    for (int s = 0; s < stages; ++s) ring.ask(s);
  }
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
    ring.wait();
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (ring.has(n)) ring.vector(out[n][k], n, k);
    ring.release();
  }
};

template <class Group, class T, int VEC, int K, int N, int Needed> class AsyncStream {
  static constexpr int vector_bytes = VEC * int(sizeof(T));
  unsigned char* ring;  // this thread's place in [stages][tensors that are not missing][K][threads of the block] vectors
  const T* at[N];  // this thread's columns of the row that is requested next
  int64_t jump[N], asking, step, rows;
  Columns<VEC, K> columns;
  int stages, tensors = 0, stage = 0;

 public:
  LIGER_DEVICE AsyncStream(const Group& group, const RowSteps& steps, int stages, int shared_offset)
      : asking(steps.first), step(steps.step), rows(steps.rows), columns(warp_columns<VEC, K>(group, steps.cols)), stages(stages) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Rows& tensor = steps.tensors[n];
      at[n] = tensor.data ? static_cast<const T*>(tensor.data) + (steps.first * tensor.stride + columns.first) : nullptr;
      jump[n] = steps.step * tensor.stride;
      tensors += tensor.data != nullptr;
    }
    ring = shared<unsigned char>(shared_offset) + thread_id() * vector_bytes;
    for (int s = 0; s < stages; ++s) ask(s);
  }
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
    wait_for_copies(stages - 1);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        out[n][k] = {};
        if (has(n) && columns.has(k)) load(out[n][k], reinterpret_cast<const T*>(place(stage, n, k)));
      }
    ask(stage);
    if (++stage == stages) stage = 0;
  }

 private:
  LIGER_DEVICE bool has(int n) const { return n < Needed || at[n] != nullptr; }
  LIGER_DEVICE unsigned char* place(int s, int n, int k) const {
    return ring + ((s * tensors + n) * K + k) * block_threads() * vector_bytes;
  }
  // Each call closes one group of copies, even past the last row, because wait_for_copies() counts groups.
  LIGER_DEVICE void ask(int s) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!has(n)) continue;
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
  LIGER_DEVICE RegisterStream(const Group& group, const RowSteps& steps, int, int)
      : taking(steps.first), step(steps.step), rows(steps.rows), columns(warp_columns<VEC, K>(group, steps.cols)) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Rows& tensor = steps.tensors[n];
      at[n] = tensor.data ? static_cast<const T*>(tensor.data) + (steps.first * tensor.stride + columns.first) : nullptr;
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

 private:
  template <int From, int To> LIGER_DEVICE void fetch(Packed<T, VEC> (&out)[N][K], int64_t row) {
#pragma unroll
    for (int n = From; n < To; ++n) {
      const T* const from = opaque(at[n]);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        out[n][k] = {};
        if (row < rows && columns.has(k) && at[n] != nullptr) load<Hint::stream>(out[n][k], from + k * columns.step);
      }
      if (at[n] != nullptr) at[n] += jump[n];
    }
  }
};

// The implementation for this device. Rows that are read by single elements (VEC == 1) may be unaligned, which copies to shared memory
// cannot be. Async: whether asynchronous copies are faster for this kernel, where there are any.
template <class Group, class T, int VEC, int K, int N, int Needed, int Ahead, bool Async>
using RowStream = std::conditional_t<has_bulk_copies && (VEC > 1), RingStream<Group, T, VEC, K, N, Needed>,
                                     std::conditional_t<has_async_copies && Async && (VEC > 1), AsyncStream<Group, T, VEC, K, N, Needed>,
                                                        RegisterStream<Group, T, VEC, K, N, Ahead>>>;

}  // namespace liger::gpu
