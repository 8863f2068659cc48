// Rows for kernels of two passes (softmax): the first pass computes a statistic of the whole row, the second one maps each element with it.
// Between the passes a row stays with the threads that loaded it, in registers (HeldRow) or in registers and shared memory (LongRow), so
// that all but the longest rows are read once. With N matrices (dy and y) the threads hold the same row of each.
#pragma once
#include "gpu/held_vectors.h"

namespace liger::gpu {

struct TwoPassArgs {
  int64_t rows, cols;
  Rows in[2];
  MutableRows out;
  int threads_per_row = 0;
  int slots = 0, shared_offset = 0;  // LongRow: vectors of each matrix that a thread keeps in shared memory; their byte offset

  // The address of an element of matrix n.
  template <class T> LIGER_DEVICE const T* element(int n, int64_t row, int64_t column) const {
    return static_cast<const T*>(in[n].data) + (row * in[n].stride + column);
  }
};

// Addresses of a row's elements; offsets count from column `first`.
template <class T, int N> struct RowAddresses {
  const T* begin[N];

  LIGER_DEVICE RowAddresses(const TwoPassArgs& a, int64_t row, int64_t first) {
#pragma unroll
    for (int n = 0; n < N; ++n) begin[n] = opaque(a.element<T>(n, row, first));
  }
  LIGER_DEVICE const T* operator()(int n, int64_t offset) const { return begin[n] + offset; }
};

// Stores f(x) of each element x of a vector, or f(x, y) of the elements of two vectors.
template <Hint H, class T, int VEC, class F, class... Vectors>
LIGER_DEVICE void store_mapped(T* to, F f, const Packed<T, VEC>& first, const Vectors&... others) {
  float values[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) values[i] = f(first[i], others[i]...);
  Packed<T, VEC> packed;
  packed.set(values);
  store<H>(to, packed);
}

// A row of whole vectors in the registers of a block or, with Clusters, of a cluster of blocks: K vectors of each of N matrices per thread.
// Several rows of this kind may share a block.
template <class T, int VEC, int K, int N, bool Clusters> class HeldRow {
 public:
  using Group = BasicRowGroup<0, Clusters>;

  LIGER_DEVICE HeldRow(const TwoPassArgs& a, const Group& group)
      : row_(group.first_row()), held_{{group.index, group.threads_per_row, row_ < a.rows ? int(a.cols) : 0}} {
    held_.template load<Hint::stream>(RowAddresses<T, N>(a, row_, held_.columns.first));
  }
  // Returns the statistic of this thread's part of the row. Statistic is constructed from vectors and, for LongRow, has add() for more of
  // them.
  template <class Statistic> LIGER_DEVICE Statistic statistic() const {
    return {held_.in_registers, [&](int k) { return held_.columns.has(k); }};
  }
  // Stores f of each element in the same row of `out`.
  template <class F> LIGER_DEVICE void map(const MutableRows& out, F f) {
    held_.forget_widened();
    T* const to = static_cast<T*>(out.data) + (row_ * out.stride + held_.columns.first);
    held_.for_each_in_registers(
        [&](int k, const auto&... vectors) { store_mapped<Hint::stream>(to + k * held_.columns.step, f, vectors...); });
  }

 private:
  int64_t row_;
  HeldVectors<T, VEC, K, N> held_;
};

// A row of any length at any address (RowParts). The rows of all matrices must be equally far from a multiple of 16 bytes. A thread holds
// its first K vectors of each matrix in registers, and the next `slots` in shared memory. The second pass reads the remaining vectors
// again. A row has a block or a cluster to itself, or shares a block with other rows of this kind.
template <class T, int VEC, int K, int N> class LongRow {
 public:
  using Group = BasicRowGroup<0, (VEC > 1)>;

  LIGER_DEVICE LongRow(const TwoPassArgs& a, const Group& group)
      : a_(a),
        row_(int(group.first_row())),
        parts_(has_edges && row_ < a.rows ? a.cols : 0, row_ < a.rows ? unaligned_head<VEC>(element(0, 0), a.cols) : 0, group.index),
        held_{{group.index, group.threads_per_row, int(least(end(), int64_t{most(a)} * group.threads_per_row * VEC))},
              a.shared_offset,
              most(a)} {
    const RowAddresses<T, N> at(a, row_, parts_.head + held_.columns.first);
    held_.template copy_remaining_to_shared<Hint::stream>(at);
    held_.template load<Hint::stream>(at);
    if constexpr (single_with_row) load_single(single_);
  }
  template <class Statistic> LIGER_DEVICE Statistic statistic() {
    Statistic found(held_.in_registers, [&](int k) { return held_.columns.has(k); });
    if constexpr (!single_with_row) load_single(single_);
    if (parts_.single >= 0) found.add(single_, always);
    held_.for_each_in_shared([&](int, const auto&... vectors) {
      const Packed<T, VEC> row_vectors[N][1] = {{vectors}...};
      found.add(row_vectors, always);
    });
    for_each_remaining([&](const auto& left, Column, const auto& columns) { found.add(left, [&](int k) { return columns.has(k); }); });
    return found;
  }
  template <class F> LIGER_DEVICE void map(const MutableRows& out, F f) {
    held_.forget_widened();
    Packed<T, 1> single[N][1];
    if constexpr (single_with_row) load_single(single);  // loaded again, because registers are scarce between the passes
    T* const row = static_cast<T*>(out.data) + (int64_t{row_} * out.stride + parts_.head);
    T* const to = opaque(row + held_.columns.first);
    held_.for_each([&](int k, auto... vectors) { store_mapped<Hint::stream>(to + k * held_.columns.step, f, vectors...); });
    for_each_remaining([&](const auto& left, Column begin, const auto& columns) {
#pragma unroll
      for (int k = 0; k < batch; ++k)
        if (columns.has(k))
          for_all_matrices<N>([&](auto... n) { store_mapped<Hint::stream>(to + begin + k * columns.step, f, left[n][k]...); });
    });
    if constexpr (!single_with_row) load_single(single);
    if (parts_.single >= 0)
      for_all_matrices<N>([&](auto... n) { store_mapped<Hint::keep>(row + (parts_.single - parts_.head), f, single[n][0]...); });
  }

 private:
  static constexpr bool has_edges = VEC > 1;
  static constexpr int batch = VEC == 1 ? 4 : 1;  // remaining vectors that a thread loads before it uses the first one
  // Whether single elements are loaded together with the row's vectors. Two fp32 matrices leave no registers for them, since their
  // statistic also sums rounding errors.
  static constexpr bool single_with_row = N * sizeof(T) < 8;
  static constexpr auto always = [](int) { return true; };

  // The type of a column. The planner uses vectors only for rows of less than 2^30 columns.
  using Column = std::conditional_t<has_edges, int, int64_t>;

  // The most vectors of each matrix that a thread holds. The planner uses shared memory only for vectors of 16 bytes.
  LIGER_DEVICE static int most(const TwoPassArgs& a) { return has_edges ? K + a.slots : K; }
  LIGER_DEVICE static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  // The end of the row's whole vectors, in elements from the first vector on.
  LIGER_DEVICE Column end() const { return row_ < a_.rows ? (Column(a_.cols) - parts_.head) / VEC * VEC : 0; }
  LIGER_DEVICE const T* element(int n, int64_t column) const { return a_.template element<T>(n, row_, column); }
  LIGER_DEVICE void load_single(Packed<T, 1> (&single)[N][1]) const {
    if (parts_.single >= 0)
#pragma unroll
      for (int n = 0; n < N; ++n) load(single[n][0], element(n, parts_.single));
  }
  template <class F> LIGER_DEVICE void for_each_remaining(F f) const {
    const int step = held_.columns.step;
#pragma unroll 1
    for (Column begin = Column(K + a_.slots) * step; begin < end(); begin += batch * step) {
      Columns<VEC, batch> columns = held_.columns.template from<batch>(0);
      columns.left = int(least(end() - begin, batch * step)) - int(columns.first);
      Packed<T, VEC> left[N][batch];
#pragma unroll
      for (int n = 0; n < N; ++n) columns.load(left[n], a_.in[n].data, int64_t{row_} * a_.in[n].stride + parts_.head + begin);
      f(left, begin, columns);
    }
  }

  const TwoPassArgs& a_;
  int row_;
  RowParts<VEC> parts_;
  HeldVectors<T, VEC, K, N, true> held_;
  Packed<T, 1> single_[N][1];
};

}  // namespace liger::gpu
