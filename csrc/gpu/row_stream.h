// RowStream: loads the rows that a thread processes, one after another, and mostly requests each row before the thread needs it. For the
// norms' backward.
//
//   take(out)      writes the thread's vectors of the next row to `out`: the columns of warp_columns(), with zeros past the last column. If
//                  the row is past the last one, `out` is undefined: a thread that takes it, because other threads of its warp or block
//                  still have a row, must not use its values.
//   release()      lets another row be fetched in the place of the row that was taken. All lanes of a warp call take() together, and
//                  release() together.
//
// A kernel that is short of registers reads a row twice, vector by vector, by these functions instead (AsyncStream, HeldStream):
//   wait()         waits for the next row, which must not be past the last one.
//   vectors(k)     returns the thread's vector k of each tensor of that row.
//   read_again()   is called between the two readings.
//   replace(k)     is called after vectors(k) of the second reading: vector k of another row may be fetched in its place.
//   finish_row()   is called after all K calls of replace().
//
// There are three implementations:
// - RingStream, where the hardware has bulk copies (Hopper and later). Each warp has a ring buffer in shared memory. Each of its pipeline
//   stages holds the warp's columns of one row. One lane requests rows: when the warp has loaded a row into registers, the lane requests
//   another one in its place. So loads are in flight during reductions and stores, without taking registers or needing a barrier of the
//   block. On an H200 a copy through such buffers is as fast as the best plain copy if a request has at least 512 bytes; buffers that a
//   whole block shares, and copies by cp.async, are slower.
// - AsyncStream, where there are asynchronous copies (Ampere, Ada) and the kernel is faster with them. Each thread has a ring buffer for
//   its vectors, which no other thread reads. So a vector may stay there while it is read twice, and be replaced without a barrier. take()
//   itself requests another row, and release() does nothing.
// - RegisterStream, elsewhere: the next row is loaded into registers while the current one is processed. release() does nothing.
// HeldStream adds the functions for reading twice to any of them: it holds the row in registers between the two readings.
// The ring buffers of a block take plan.stages * ring_row_bytes() (launch/plan.h) of shared memory.
#pragma once
#include "gpu/rows.h"

namespace liger::gpu {

// The vectors [begin, end) of a row, which belong to a warp. They are contiguous, so that one copy brings them. Each warp of the row has
// the same number of vectors, a multiple of eight (128 bytes for vectors of 16 bytes); the last warps may have fewer.
struct WarpShare {
  int lane, lanes;  // lanes: how many lanes of the warp share the row; lane: this thread's number among them
  int64_t begin, end;

  template <class Group> LIGER_DEVICE WarpShare(const Group& group, int64_t vectors) : lanes(group.lanes()) {
    lane = group.index & (lanes - 1);
    const int warps = group.threads_per_row / lanes, warp = uniform(group.index / lanes);
    const int64_t share = (quotient(vectors + warps - 1, warps) + 7) & ~7;
    begin = warp * share < vectors ? warp * share : vectors;
    end = begin + share < vectors ? begin + share : vectors;
  }
};
// Returns this thread's vectors of its warp's share, at most K.
template <int VEC, int K, class Group> LIGER_DEVICE Columns<VEC, K> warp_columns(const Group& group, int64_t cols) {
  const WarpShare share(group, VEC == 1 ? cols : cols / VEC);
  return {share.lane, share.lanes, share.begin * VEC, share.end * VEC};
}

// The rows first, first + step, first + 2 * step, ... below `rows`, of N tensors of one dtype.
template <int N> struct RowSteps {
  int64_t first, step, rows, cols;
  Rows tensors[N];
};
// The row that a stream requests next, and the address in each tensor at which the stream's columns of that row begin. Addresses count in
// Unit, which is T or a byte.
template <class Unit, int N> struct NextRow {
  int64_t row, step, rows;
  int64_t pitch[N], jump[N];  // pitch: from one row of the tensor to the next; jump: from one row of the stream to the next
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

// One vector of each of N tensors.
template <class T, int VEC, int N> struct Vectors {
  Packed<T, VEC> vectors[N];
  LIGER_DEVICE Packed<T, VEC>& operator[](int n) { return vectors[n]; }
  LIGER_DEVICE const Packed<T, VEC>& operator[](int n) const { return vectors[n]; }
};
template <class T, int VEC, int K, int N> LIGER_DEVICE Vectors<T, VEC, N> vectors_at(const Packed<T, VEC> (&row)[N][K], int k) {
  Vectors<T, VEC, N> out;
#pragma unroll
  for (int n = 0; n < N; ++n) out[n] = row[n][k];
  return out;
}

// A warp's ring buffer in shared memory: [stages][N][K * lanes of a warp] vectors. A stage holds the warp's columns of one row or, where a
// warp has several rows at a time, of each of these.
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
    warp_barrier();  // all lanes have read the stage
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
    thread_base_ = ring_ + (lane_id() / lanes_ * lanes_ * K + share.lane) * vector_bytes;
    arrivals_ = shared<Mbarrier>(shared_offset + warps * stages * stage_bytes) + warp * stages;
    clear_unwritten(share, steps);
    if (is_elected_lane())
      for (int s = 0; s < stages; ++s) init_mbarrier(arrivals_ + s);
    warp_barrier();
    for (int s = 0; s < stages; ++s) request(s);
  }
  // Stores zeros where no copy writes: past the last column and, where a warp has several rows, in rows past the last one.
  LIGER_DEVICE void clear_unwritten(const WarpShare& share, const RowSteps<N>& steps) {
    for (int s = 0; s < stages_; ++s)
      for (int n = 0; n < N; ++n)
        for (int k = 0; k < K; ++k)
          if ((k * lanes_ + share.lane) * vector_bytes >= bytes_ || (!Group::whole_warps && steps.first + s * steps.step >= steps.rows))
            store(place(s, n, k), Packed<T, VEC>{});
  }
  // The address of this thread's vector k of tensor n.
  LIGER_DEVICE T* place(int stage, int n, int k) const {
    return reinterpret_cast<T*>(thread_base_ + stage * stage_bytes + n * tensor_bytes + k * lanes_ * vector_bytes);
  }
  // Requests the next row or, where a warp has several at a time, the next ones.
  LIGER_DEVICE void request(int stage) {
    // A warp may wait for a row past the last one, because other rows of its block are not past it. Nothing is copied then, but the
    // announcement of 0 bytes ends the wait.
    const int64_t left = next_.rows - next_.row;
    const int warp_rows = warp_width() / lanes_, live = left <= 0 || bytes_ == 0 ? 0 : left < warp_rows ? int(left) : warp_rows;
    if (is_elected_lane()) {
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

  int lanes_, stages_, bytes_;  // lanes_: lanes of the warp that share a row; bytes_: the warp's columns of one row of one tensor
  NextRow<unsigned char, N> next_;  // where a warp has several rows at a time, the first of them
  unsigned char *ring_, *thread_base_;  // the warp's buffer, and this thread's first vector in it
  Mbarrier* arrivals_;  // for each stage, a counter of the bytes that have arrived (platform_cuda.h)
  int stage_ = 0, parity_ = 0;  // the stage of the next row, and the parity of its mbarrier
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

  // A row that is read twice stays in its pipeline stage until replace().
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
  // Stores zeros in a stage whose row is past the last one, because no copy writes it.
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
  unsigned char* ring_;  // this thread's first vector in [stages][N][K][threads of the block] vectors
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
  // Loads tensors From to To - 1 of the next row.
  template <int From, int To> LIGER_DEVICE void fetch(Packed<T, VEC> (&out)[N][K], NextRow<T, N>& next_row) {
#pragma unroll
    for (int n = From; n < To; ++n) {
      const T* const from = opaque(next_row.at[n]);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        out[n][k] = {};
        if (next_row.exists() && columns_.has(k)) load<Hint::stream>(out[n][k], from + k * columns_.step);
      }
    }
    next_row.advance();
  }

  Columns<VEC, K> columns_;
  NextRow<T, N> ahead_, taken_;  // the next row of the tensors that are loaded one row ahead, and of the others
  Packed<T, VEC> next_[N][K];
};

// Adds the functions for reading a row twice to a stream that has take() and release().
template <class Stream, class T, int VEC, int K, int N> class HeldStream {
 public:
  template <class Group>
  LIGER_DEVICE HeldStream(const Group& group, const RowSteps<N>& steps, int stages, int shared_offset)
      : stream_(group, steps, stages, shared_offset) {}
  LIGER_DEVICE void wait() {
    stream_.take(row_);
    stream_.release();
  }
  LIGER_DEVICE Vectors<T, VEC, N> vectors(int k) const { return vectors_at(row_, k); }
  // Otherwise the compiler would hold the row widened to fp32, in twice as many registers.
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

// Selects the implementation for this device, for N tensors and K vectors of each per thread. Ahead: how many tensors RegisterStream loads
// a row ahead. Async: take AsyncStream where the device has asynchronous copies, since it is faster for this kernel. Rows that are read by
// single elements (VEC == 1) may be unaligned, which copies to shared memory cannot be, and take RegisterStream.
template <class Group, class T, int VEC, int K, int N, int Ahead, bool Async>
using RowStream = std::conditional_t<has_bulk_copies && (VEC > 1), RingStream<Group, T, VEC, K, N>,
                                     std::conditional_t<has_async_copies && Async && (VEC > 1), AsyncStream<Group, T, VEC, K, N>,
                                                        RegisterStream<Group, T, VEC, K, N, Ahead>>>;

}  // namespace liger::gpu
