// Rows of logits that an in-place kernel reads once, holds in registers and shared memory, and overwrites: the addresses of a row's
// elements (WholeRow, RowInChunks), and the part of the row that a thread holds (HeldLogits).
#pragma once
#include "gpu/cross_entropy_rows.h"
#include "gpu/held_vectors.h"
#include "launch/cross_entropy.h"

namespace liger::gpu {

// A row of one matrix.
template <class T> class WholeRow {
 public:
  LIGER_DEVICE WholeRow(void* matrix, int64_t stride, int row) : row_(static_cast<T*>(matrix) + row * stride) {}
  // Returns a function from a column, counted from `first`, to the element's address. Calls must pass columns in ascending order.
  LIGER_DEVICE auto from(int first) const {
    return [begin = opaque(row_ + first)](int column) { return begin + column; };
  }

 private:
  T* row_;
};

// The matrices of a vocabulary that is cut into chunks: each chunk is a range of classes, and its logits are a matrix of their own. So a
// row of logits lies in several matrices, in the order of the classes.
struct ChunkMatrices {
  static constexpr int most = launch::most_vocabulary_chunks;
  int end[most];  // one past the chunk's last column; for the last chunk, a number beyond all columns
  void* begin[most];  // the address that column 0 of row 0 would have in the chunk's matrix
  int64_t stride[most];
};
template <class T> class RowInChunks {
 public:
  LIGER_DEVICE RowInChunks(const ChunkMatrices& chunks, int row) : chunks_(chunks), row_(row) {}
  class Walk {
   public:
    LIGER_DEVICE Walk(const ChunkMatrices& chunks, int row, int first) : chunks_(chunks), row_(row), first_(first) { take(0); }
    // Columns ascend, so stepping from chunk to chunk suffices. A search for each vector was much slower (docs/measurements.md).
    LIGER_DEVICE T* operator()(int column) {
      while (first_ + column >= end_) take(chunk_ + 1);
      return begin_ + column;
    }

   private:
    LIGER_DEVICE void take(int chunk) {
      chunk_ = chunk;
      end_ = chunks_.end[chunk];
      begin_ = opaque(static_cast<T*>(chunks_.begin[chunk]) + (row_ * chunks_.stride[chunk] + first_));
    }
    const ChunkMatrices& chunks_;
    int row_, first_, chunk_, end_;
    T* begin_;
  };
  LIGER_DEVICE Walk from(int first) const { return {chunks_, row_, first}; }

 private:
  const ChunkMatrices& chunks_;
  int row_;
};

// A thread's part of a row: vectors (HeldVectors), and at most one of the single elements behind the row's whole vectors. Vectors in
// registers that lie past the end of the row are -inf, which adds nothing to a sum of exponentials and raises no maximum: so largest() and
// add() do not test them for the end of the row.
template <class T, int N, int K, class Row> class HeldLogits {
 public:
  // Starts the loads of the vectors. cols: 0 if the row need not be loaded. shared_offset: bytes; the vectors in shared memory begin there.
  template <class Group>
  LIGER_DEVICE HeldLogits(const Row& row, const Group& group, int cols, int shared_offset)
      : row_(row), held_{{group.index, group.threads_per_row, cols / N * N}, shared_offset} {
    auto at = [from = row_.from(int(held_.columns.first))](int, int offset) mutable { return from(offset); };
    held_.template load<Hint::in_place>(at, minus_infinities<T, N>());
    held_.template copy_remaining_to_shared<Hint::in_place>(at);
  }
  // Starts the load of the single element; only for a row that the constructor has loaded.
  template <class Group> LIGER_DEVICE void load_single(const Group& group, int cols) {
    const int column = cols / N * N + group.index;
    if (column < cols) single_ = column, load(last_, row_.from(column)(0));
  }
  // Returns whether the thread owns this column. whole: the number of columns in whole vectors.
  template <class Group> LIGER_DEVICE bool owns(int column, int whole, const Group& group) const {
    return column < whole ? (column / N & (group.threads_per_row - 1)) == group.index : column == single_;
  }

  LIGER_DEVICE float largest() const {
    constexpr auto all = [](int) { return true; };
    float most = fmaxf(gpu::largest(held_.in_registers[0], all), last_[0]);
    held_.for_each_in_shared([&](int, const auto& raw) {
      const Packed<T, N> one[1] = {raw};
      most = fmaxf(most, gpu::largest(one, all));
    });
    return most;
  }
  // Adds the terms of each element to `totals`. f(x, parts) adds the terms of x to `parts`; the terms of -inf must be 0. The elements of a
  // vector are summed first, so that the large totals are rounded fewer times.
  template <int Terms, class F> LIGER_DEVICE void add(float (&totals)[Terms], F f) {
    // Without instructions for pairs the maximum has widened all elements, and the compiler would keep the widened ones in registers.
    if constexpr (!has_pairs && sizeof(T) == 2) held_.forget_widened();
    add_terms(totals, last_, f);
#pragma unroll
    for (int k = 0; k < K; ++k) add_terms(totals, held_.in_registers[0][k], f);
    held_.for_each_in_shared([&](int, const auto& raw) { add_terms(totals, raw, f); });
  }
  template <class F> LIGER_DEVICE float sum(F f) {
    float total[1] = {0};
    add(total, [&](float x, float (&part)[1]) { part[0] += f(x); });
    return total[0];
  }
  // Calls f(vector, column) for each vector that the row has, and for the single element as a vector of one.
  template <class F> LIGER_DEVICE void for_each(F f) const {
    held_.for_each([&](int k, const auto& raw) { f(raw, int(held_.columns.first) + k * held_.columns.step); });
    if (single_ >= 0) f(last_, single_);
  }
  // Overwrites the row: each vector, and the single element, by f(vector, column).
  template <class F> LIGER_DEVICE void replace(F f) {
    held_.forget_widened();
    const int first = int(held_.columns.first);
    auto at = row_.from(first);
    for_each([&](const auto& raw, int column) { store<Hint::stream>(at(column - first), f(raw, column)); });
  }
  // For rare cases: reads each vector from memory again, in a loop of few instructions and registers, and calls f(vector, column, address)
  // with it; and with the single element.
  template <class F> LIGER_DEVICE void read_again(F f) const {
    const auto& columns = held_.columns;
    auto at = row_.from(int(columns.first));
#pragma unroll 1
    for (int k = 0; columns.has(k); ++k) {
      T* const address = at(k * columns.step);
      Packed<T, N> raw;
      load<Hint::in_place>(raw, address);
      f(raw, int(columns.first) + k * columns.step, address);
    }
    if (single_ >= 0) f(last_, single_, row_.from(single_)(0));
  }
  // Sets every element of this thread's part to `value`, also if the row was not loaded.
  template <class Group> LIGER_DEVICE void fill(float value, const Group& group, int cols) const {
    const Columns<N, K> all(group.index, group.threads_per_row, cols / N * N);
    auto at = row_.from(all.first);
#pragma unroll 1
    for (int k = 0; all.has(k); ++k) store<Hint::stream>(at(k * all.step), same_value(Packed<T, N>{}, value));
    const int column = cols / N * N + group.index;
    if (column < cols) *row_.from(column)(0) = from_float<T>(value);
  }

 private:
  template <int Terms, class P, class F> LIGER_DEVICE static void add_terms(float (&totals)[Terms], const P& raw, F f) {
    float parts[Terms] = {};
#pragma unroll
    for (int j = 0; j < P::elements; ++j) f(raw[j], parts);
#pragma unroll
    for (int i = 0; i < Terms; ++i) totals[i] += parts[i];
  }

  Row row_;
  HeldVectors<T, N, K> held_;
  Packed<T, 1> last_ = minus_infinities<T, 1>();
  int single_ = -1;  // the column of the single element; -1: none
};

}  // namespace liger::gpu
