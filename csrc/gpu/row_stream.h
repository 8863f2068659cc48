// The rows that a thread works on, one after another, fetched before they are needed: RowStream.
//
//   take(out)      gives the thread's vectors of the next row, those of warp_columns(), with zeros past the last column. Vectors of a row
//                  past the last one are not set: a thread that takes one, because others of its warp or block still have a row, must not
//                  use them.
//   release()      says that another row may be fetched in the place of the one taken. All lanes of a warp call both functions together.
//
// A kernel whose registers do not hold a row reads it twice, vector by vector, by these functions instead (AsyncStream, HeldStream):
//   wait()         waits for the next row, which must not be past the last one.
//   vectors(k)     returns the thread's vector k of each tensor of that row.
//   read_again()   is called between the two readings.
//   replace(k)     is called after vectors(k) of the second reading: the same vectors of another row may be fetched in their place.
//   finish_row()   is called after all K calls of replace().
//
// There are three implementations:
// - RingStream, where the hardware has bulk copies (Hopper and later). Each warp has a ring buffer in shared memory, for its own columns of
//   some rows. One lane requests rows; when the warp has loaded a row into registers, it requests another one in its place. So loads are in
//   flight during reductions, exponentials and stores, without taking registers or needing a barrier of the block. On an H200 a copy
//   through such rings is as fast as the best plain copy if a request has at least 512 bytes; with rings of whole blocks, or by cp.async,
//   it is 2 to 6 % slower.
// - AsyncStream, where there are asynchronous copies (Ampere, Ada). Each thread has a ring of its own vectors, which no other thread reads.
//   So a vector may stay there while it is read twice, and be replaced without a barrier. take() requests the next row: release() does
//   nothing.
// - RegisterStream, elsewhere: the next row is loaded into registers while this one is processed. release() does nothing.
// HeldStream gives any of them the functions for reading twice, by holding the row in registers between the two.
// The rings of a block take plan.stages rows of ring_row_bytes() (launch/plan.h) of shared memory.
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
// The row of them that a stream requests next, and where in each tensor the stream's columns of it begin. Addresses count in T, or in
// bytes.
template <class Unit, int N> struct NextRow {
  int64_t row, step, rows;
  int64_t pitch[N], jump[N];  // from one row of the tensor to the next, and from one row of these to the next
  const Unit* at[N];

  LIGER_DEVICE NextRow(const RowSteps<N>& steps, int64_t first_row, int64_t first_column, int64_t units_per_element = 1)
      : row(first_row), step(steps.step), rows(steps.rows) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      pitch[n] = steps.tensors[n].stride * units_per_element;
      jump[n] = step * pitch[n];
      at[n] = static_cast<const Unit*>(steps.tensors[n].data) + (row * pitch[n] + first_column * units_per_element);
    }
  }
  LIGER_DEVICE bool exists() const { return row < rows; }
  LIGER_DEVICE void advance() {
    row += step;
#pragma unroll
    for (int n = 0; n < N; ++n) at[n] += jump[n];
  }
};

// A vector of each of N tensors.
template <class T, int VEC, int N> struct Vectors {
  Packed<T, VEC> of[N];
  LIGER_DEVICE Packed<T, VEC>& operator[](int n) { return of[n]; }
  LIGER_DEVICE const Packed<T, VEC>& operator[](int n) const { return of[n]; }
};
template <class T, int VEC, int K, int N> LIGER_DEVICE Vectors<T, VEC, N> vectors_of(const Packed<T, VEC> (&row)[N][K], int k) {
  Vectors<T, VEC, N> out;
#pragma unroll
  for (int n = 0; n < N; ++n) out[n] = row[n][k];
  return out;
}

// A warp's ring buffer: its vectors of `stages` rows in shared memory, [stages][N][K * lanes of a warp].
template <class Group, class T, int VEC, int K, int N> class RingStream {
  static constexpr int vector_bytes = VEC * int(sizeof(T)), tensor_bytes = K * warp_width() * vector_bytes, stage_bytes = N * tensor_bytes;

 public:
  LIGER_DEVICE RingStream(const Group& group, const RowSteps<N>& steps, int stages, int shared_offset)
      : RingStream(group, WarpShare(group, steps.cols / VEC), steps, stages, shared_offset) {}
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
    wait_for_phase(arrivals_ + stage_, parity_);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) load(out[n][k], place(stage_, n, k));
  }
  LIGER_DEVICE void release() {
    finish_reads_before_copies();
    warp_barrier();  // of all lanes
    request(stage_);
    if (++stage_ == stages_) stage_ = 0, parity_ ^= 1;
  }

 private:
  LIGER_DEVICE RingStream(const Group& group, const WarpShare& share, const RowSteps<N>& steps, int stages, int shared_offset)
      : lanes_(share.lanes),
        stages_(stages),
        bytes_(uniform(int(share.end - share.begin)) * vector_bytes),
        next_(steps, uniform(steps.first - lane_id() / lanes_), uniform(share.begin) * VEC, sizeof(T)) {
    const int warps = block_threads() / warp_width(), warp = uniform(warp_id());
    ring_ = shared<unsigned char>(shared_offset) + warp * stages * stage_bytes;
    own_ = ring_ + (lane_id() / lanes_ * lanes_ * K + share.lane) * vector_bytes;
    arrivals_ = shared<Mbarrier>(shared_offset + warps * stages * stage_bytes) + warp * stages;
    clear_what_no_copy_writes(share, steps);
    if (elected())
      for (int s = 0; s < stages; ++s) init_mbarrier(arrivals_ + s);
    warp_barrier();
    for (int s = 0; s < stages; ++s) request(s);
  }
  // Columns past the last one, and rows past the last one where a warp has several, are zeros.
  LIGER_DEVICE void clear_what_no_copy_writes(const WarpShare& share, const RowSteps<N>& steps) {
    for (int s = 0; s < stages_; ++s)
      for (int n = 0; n < N; ++n)
        for (int k = 0; k < K; ++k)
          if ((k * lanes_ + share.lane) * vector_bytes >= bytes_ || (!Group::whole_warps && steps.first + s * steps.step >= steps.rows))
            store(place(s, n, k), Packed<T, VEC>{});
  }
  // This thread's vector k of tensor n.
  LIGER_DEVICE T* place(int stage, int n, int k) const {
    return reinterpret_cast<T*>(own_ + stage * stage_bytes + n * tensor_bytes + k * lanes_ * vector_bytes);
  }
  // Requests the next row, or, where a warp has several, its next rows.
  LIGER_DEVICE void request(int stage) {
    // A warp may wait for a row past the last one, if other rows of its block are not past it: then nothing is copied, but announced.
    const int64_t left = next_.rows - next_.row;
    const int warp_rows = warp_width() / lanes_, live = left <= 0 || bytes_ == 0 ? 0 : left < warp_rows ? int(left) : warp_rows;
    if (elected()) {
      unsigned char* const to = ring_ + stage * stage_bytes;
      expect_bytes(arrivals_ + stage, live * bytes_ * N);
#pragma unroll 1
      for (int row = 0; row < live; ++row)
#pragma unroll
        for (int n = 0; n < N; ++n)
          bulk_copy(to + n * tensor_bytes + row * lanes_ * K * vector_bytes, next_.at[n] + row * next_.pitch[n], bytes_, arrivals_ + stage);
    }
    next_.advance();
  }

  int lanes_, stages_, bytes_;  // lanes_: of the warp, that share a row; bytes_: of the warp's columns of one row of one tensor
  NextRow<unsigned char, N> next_;  // where a warp has several rows, the first of them
  unsigned char *ring_, *own_;  // the warp's buffer, and this thread's first vector in it
  Mbarrier* arrivals_;  // for each stage a counter of the bytes that have arrived (platform_cuda.h)
  int stage_ = 0, parity_ = 0;  // of the row that is taken next
};

template <class Group, class T, int VEC, int K, int N> class AsyncStream {
  static constexpr int vector_bytes = VEC * int(sizeof(T));

 public:
  LIGER_DEVICE AsyncStream(const Group& group, const RowSteps<N>& steps, int stages, int shared_offset)
      : columns_(warp_columns<VEC, K>(group, steps.cols)), stages_(stages), next_(steps, steps.first, columns_.first) {
    ring_ = shared<unsigned char>(shared_offset) + thread_id() * vector_bytes;
    for (int s = 0; s < stages; ++s) {
      if (!next_.exists()) clear(s);
      request(s);
    }
  }
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
    wait();
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) out[n][k] = vector(n, k);
    request(stage_);
    advance();
  }
  LIGER_DEVICE void release() {}

  // A row that is read twice stays in the ring until then.
  LIGER_DEVICE void wait() { wait_for_copies(stages_ - 1); }
  LIGER_DEVICE Vectors<T, VEC, N> vectors(int k) const {
    Vectors<T, VEC, N> out;
#pragma unroll
    for (int n = 0; n < N; ++n) out[n] = vector(n, k);
    return out;
  }
  LIGER_DEVICE void read_again() {}
  LIGER_DEVICE void replace(int k) {
#pragma unroll
    for (int n = 0; n < N; ++n) copy(stage_, n, k);
  }
  LIGER_DEVICE void finish_row() {
    close();
    advance();
  }

 private:
  LIGER_DEVICE Packed<T, VEC> vector(int n, int k) const {
    Packed<T, VEC> out = {};
    if (columns_.has(k)) load(out, place(stage_, n, k));
    return out;
  }
  // The row is past the last one, and no copy brings it.
  LIGER_DEVICE void clear(int stage) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) store(place(stage, n, k), Packed<T, VEC>{});
  }
  LIGER_DEVICE T* place(int stage, int n, int k) const {
    return reinterpret_cast<T*>(ring_ + ((stage * N + n) * K + k) * block_threads() * vector_bytes);
  }
  LIGER_DEVICE void request(int stage) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) copy(stage, n, k);
    close();
  }
  LIGER_DEVICE void copy(int stage, int n, int k) {
    if (next_.exists() && columns_.has(k)) async_copy(place(stage, n, k), next_.at[n] + k * columns_.step);
  }
  // Each row closes one group of copies, even past the last row, because wait_for_copies() counts groups.
  LIGER_DEVICE void close() {
    close_copies();
    next_.advance();
  }
  LIGER_DEVICE void advance() {
    if (++stage_ == stages_) stage_ = 0;
  }

  Columns<VEC, K> columns_;
  int stages_, stage_ = 0;
  NextRow<T, N> next_;
  unsigned char* ring_;  // this thread's place in [stages][N][K][threads of the block] vectors
};

// The first `Ahead` tensors are loaded one row ahead, the others when the row is taken.
template <class Group, class T, int VEC, int K, int N, int Ahead> class RegisterStream {
 public:
  LIGER_DEVICE RegisterStream(const Group& group, const RowSteps<N>& steps, int, int)
      : columns_(warp_columns<VEC, K>(group, steps.cols)), ahead_(steps, steps.first, columns_.first), taken_(ahead_) {
    fetch<0, Ahead>(next_, ahead_);
  }
  LIGER_DEVICE void take(Packed<T, VEC> (&out)[N][K]) {
#pragma unroll
    for (int n = 0; n < Ahead; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) out[n][k] = next_[n][k];
    fetch<Ahead, N>(out, taken_);
    fetch<0, Ahead>(next_, ahead_);
  }
  LIGER_DEVICE void release() {}

 private:
  // The tensors from From to To of a row.
  template <int From, int To> LIGER_DEVICE void fetch(Packed<T, VEC> (&out)[N][K], NextRow<T, N>& of) {
#pragma unroll
    for (int n = From; n < To; ++n) {
      const T* const from = opaque(of.at[n]);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        out[n][k] = {};
        if (of.exists() && columns_.has(k)) load<Hint::stream>(out[n][k], from + k * columns_.step);
      }
    }
    of.advance();
  }

  Columns<VEC, K> columns_;
  NextRow<T, N> ahead_, taken_;  // of the tensors that are loaded one row ahead, and of the others
  Packed<T, VEC> next_[N][K];
};

// The functions for reading a row twice, of a stream that has take() and release().
template <class Stream, class T, int VEC, int K, int N> class HeldStream {
 public:
  template <class Group>
  LIGER_DEVICE HeldStream(const Group& group, const RowSteps<N>& steps, int stages, int shared_offset)
      : stream_(group, steps, stages, shared_offset) {}
  LIGER_DEVICE void wait() {
    stream_.take(row_);
    stream_.release();
  }
  LIGER_DEVICE Vectors<T, VEC, N> vectors(int k) const { return vectors_of(row_, k); }
  // The compiler would hold the row widened to fp32 instead, in twice as many registers.
  LIGER_DEVICE void read_again() {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) forget(row_[n][k].data);
  }
  LIGER_DEVICE void replace(int) {}
  LIGER_DEVICE void finish_row() {}

 private:
  Stream stream_;
  Packed<T, VEC> row_[N][K];
};

// The implementation for this device, for N tensors and K vectors of each per thread; without copies to shared memory, `Ahead` of the
// tensors are fetched a row ahead. Rows that are read by single elements (VEC == 1) may be unaligned, which copies to shared memory cannot
// be. Async: whether asynchronous copies are faster for this kernel, where there are any.
template <class Group, class T, int VEC, int K, int N, int Ahead, bool Async>
using RowStream = std::conditional_t<has_bulk_copies && (VEC > 1), RingStream<Group, T, VEC, K, N>,
                                     std::conditional_t<has_async_copies && Async && (VEC > 1), AsyncStream<Group, T, VEC, K, N>,
                                                        RegisterStream<Group, T, VEC, K, N, Ahead>>>;

}  // namespace liger::gpu
