// Rows that a kernel needs twice: first for a statistic of the whole row, then to map each element with it. Between the passes a row, or
// the rows of several matrices with the same columns, stays with the threads that loaded it: HeldRow and LongRow say where.
#pragma once
#include <utility>

#include "gpu/rows.h"

namespace liger::gpu {

struct TwoPassArgs {
  int64_t rows, cols;
  Rows in[2];
  MutableRows out;
  int threads_per_row = 0;
  int slots = 0, shared_offset = 0;  // LongRow: vectors of each matrix that a thread keeps in shared memory, and where they begin
};

// Calls f(x) with element i of vector k of one matrix, or f(x, y) of two.
template <class T, int VEC, int K, int N, class F> LIGER_DEVICE float map_element(const Packed<T, VEC> (&in)[N][K], int k, int i, F f) {
  return [&]<size_t... n>(std::index_sequence<n...>) { return f(in[n][k][i]...); }(std::make_index_sequence<N>{});
}
template <Hint H, class T, int VEC, int K, int N, class F>
LIGER_DEVICE void store_mapped(T* to, const Packed<T, VEC> (&in)[N][K], int k, F f) {
  float values[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) values[i] = map_element(in, k, i, f);
  Packed<T, VEC> packed;
  packed.set(values);
  store<H>(to, packed);
}

// Makes the compiler widen the elements again, instead of keeping them in twice as many registers between the passes.
template <class T, int VEC, int K, int N> LIGER_DEVICE void forget_widened(Packed<T, VEC> (&held)[N][K]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int k = 0; k < K; ++k) forget_at_all_costs(held[n][k].data);
}

// A row of whole vectors that the registers of a block, or with Clusters of a cluster of blocks, hold, with K vectors of each of N matrices
// per thread. Several such rows may share a block.
template <class T, int VEC, int K, int N, bool Clusters> class HeldRow {
 public:
  using Group = RowGroupOf<0, Clusters>;

  LIGER_DEVICE HeldRow(const TwoPassArgs& a, const Group& group)
      : row_(group.first_row()), columns_(group.index, group.threads_per_row, row_ < a.rows ? int(a.cols) : 0) {
#pragma unroll
    for (int n = 0; n < N; ++n) columns_.template load<Hint::stream>(held_[n], a.in[n].data, row_ * a.in[n].stride);
  }
  // The statistic of this thread's part of the row. It can be made of vectors and, for LongRow, has add() for more of them.
  template <class Statistic> LIGER_DEVICE Statistic statistic() const {
    return {held_, [&](int k) { return columns_.has(k); }};
  }
  // Stores f of each element.
  template <class F> LIGER_DEVICE void map(const MutableRows& out, F f) {
    forget_widened(held_);
    T* const to = static_cast<T*>(out.data) + (row_ * out.stride + columns_.first);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns_.has(k)) store_mapped<Hint::stream>(to + k * columns_.step, held_, k, f);
  }

 private:
  int64_t row_;
  Columns<VEC, K> columns_;
  Packed<T, VEC> held_[N][K];
};

// A row of any length at any address (RowParts), if the rows of all matrices are equally far from a multiple of 16 bytes. Of a thread's
// vectors, the first K of each matrix are in its registers, the next `slots` in shared memory, in places that no other thread uses. What is
// left is read again by the second pass. A row has a block, or a cluster of blocks, to itself, or shares a block with others of its kind.
template <class T, int VEC, int K, int N> class LongRow {
 public:
  using Group = RowGroupOf<0, (VEC > 1)>;

  LIGER_DEVICE LongRow(const TwoPassArgs& a, const Group& group)
      : a_(a),
        row_(int(group.first_row())),
        parts_(has_edges && row_ < a.rows ? a.cols : 0, has_edges && row_ < a.rows ? unaligned_head(at(0, 0), a.cols) : 0, group.index),
        columns_(group.index, group.threads_per_row, int(least(end(), int64_t{K + a.slots} * group.threads_per_row * VEC))) {
#pragma unroll 1
    for (int slot = 0; slot < a.slots && columns_.has(K + slot); ++slot)
#pragma unroll
      for (int n = 0; n < N; ++n) copy_to_shared(place(slot, n), at(n, parts_.head + columns_.first + (K + slot) * columns_.step));
    close_copies();
#pragma unroll
    for (int n = 0; n < N; ++n) columns_.template load<Hint::stream>(held_[n], a.in[n].data, int64_t{row_} * a.in[n].stride + parts_.head);
    if constexpr (single_with_row) load_single(single_);
  }
  template <class Statistic> LIGER_DEVICE Statistic statistic() {
    Statistic found(held_, [&](int k) { return columns_.has(k); });
    const auto add = [&](const auto& vectors, auto has) { found.add(vectors, has); };
    if constexpr (!single_with_row) load_single(single_);
    if (parts_.single >= 0) add(single_, always);
    for_each_kept([&](const auto& kept, int) { add(kept, always); });
    for_each_left([&](const auto& left, Column, const auto& columns) { add(left, [&](int k) { return columns.has(k); }); });
    return found;
  }
  template <class F> LIGER_DEVICE void map(const MutableRows& out, F f) {
    forget_widened(held_);
    Packed<T, 1> single[N][1];
    if constexpr (single_with_row) load_single(single);  // again, because registers are scarce between the passes
    T* const row = static_cast<T*>(out.data) + (int64_t{row_} * out.stride + parts_.head);
    T* const to = opaque(row + columns_.first);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns_.has(k)) store_mapped<Hint::stream>(to + k * columns_.step, held_, k, f);
    for_each_kept([&](const auto& kept, int slot) { store_mapped<Hint::stream>(to + (K + slot) * columns_.step, kept, 0, f); });
    for_each_left([&](const auto& left, Column begin, const auto& columns) {
#pragma unroll
      for (int k = 0; k < batch; ++k)
        if (columns.has(k)) store_mapped<Hint::stream>(to + begin + k * columns.step, left, k, f);
    });
    if constexpr (!single_with_row) load_single(single);
    if (parts_.single >= 0) store_mapped<Hint::keep>(row + (parts_.single - parts_.head), single, 0, f);
  }

 private:
  static constexpr bool has_edges = VEC > 1;
  static constexpr int batch = VEC == 1 ? 4 : 1;  // vectors of a row's rest that a thread loads before it uses them
  // Are single elements loaded with the row's vectors? Two fp32 matrices leave no registers for them, since their statistic keeps rounding
  // errors.
  static constexpr bool single_with_row = N * sizeof(T) < 8;
  static constexpr auto always = [](int) { return true; };

  // A column. The planner gives vectors to rows of less than 2^30 columns alone.
  using Column = std::conditional_t<has_edges, int, int64_t>;

  LIGER_DEVICE static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  // The end of the row's whole vectors, counted from the first.
  LIGER_DEVICE Column end() const { return row_ < a_.rows ? (Column(a_.cols) - parts_.head) / VEC * VEC : 0; }
  // An element of this row of matrix n.
  LIGER_DEVICE const T* at(int n, int64_t column) const {
    return static_cast<const T*>(a_.in[n].data) + (int64_t{row_} * a_.in[n].stride + column);
  }
  LIGER_DEVICE Packed<T, VEC>* place(int slot, int n) const {
    return shared<Packed<T, VEC>>(a_.shared_offset) + ((slot * N + n) * block_threads() + thread_id());
  }
  LIGER_DEVICE void load_single(Packed<T, 1> (&single)[N][1]) const {
    if (parts_.single >= 0)
#pragma unroll
      for (int n = 0; n < N; ++n) load(single[n][0], at(n, parts_.single));
  }
  template <class F> LIGER_DEVICE void for_each_kept(F f) const {
#pragma unroll 1
    for (int slot = 0; slot < a_.slots && columns_.has(K + slot); ++slot) {
      wait_for_copies(0);  // inside of the loop, lest the compiler have all loads into registers wait, too
      Packed<T, VEC> kept[N][1];
#pragma unroll
      for (int n = 0; n < N; ++n) kept[n][0] = *place(slot, n);
      f(kept, slot);
    }
  }
  template <class F> LIGER_DEVICE void for_each_left(F f) const {
#pragma unroll 1
    for (Column begin = Column(K + a_.slots) * columns_.step; begin < end(); begin += batch * columns_.step) {
      Columns<VEC, batch> columns = columns_.template from<batch>(0);
      columns.left = int(least(end() - begin, batch * columns.step)) - int(columns.first);
      Packed<T, VEC> left[N][batch];
#pragma unroll
      for (int n = 0; n < N; ++n) columns.load(left[n], a_.in[n].data, int64_t{row_} * a_.in[n].stride + parts_.head + begin);
      f(left, begin, columns);
    }
  }

  const TwoPassArgs& a_;
  int row_;
  RowParts<VEC> parts_;
  Columns<VEC, K> columns_;
  Packed<T, VEC> held_[N][K];
  Packed<T, 1> single_[N][1];
};

}  // namespace liger::gpu
