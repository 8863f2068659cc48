// Registers and shared memory that hold one row, for kernels that need its values twice and read them from memory once.
#pragma once
#include <utility>

#include "gpu/rows.h"

namespace liger::gpu {

// Calls f with the numbers of all matrices, 0 to N - 1, as compile-time constants.
template <int N, class F> LIGER_DEVICE auto for_all_matrices(F f) {
  return [&]<int... n>(std::integer_sequence<int, n...>) {
    return f(std::integral_constant<int, n>{}...);
  }(std::make_integer_sequence<int, N>{});
}

// A thread's vectors of a row, or of the same row of N matrices with the same columns: the first K vectors of each matrix are in registers,
// the others in shared memory that no other thread uses. No thread reads another thread's vectors, so the passes over a row need no barrier
// between them.
// Limited: loops over the vectors in shared memory also end at `most`, the largest number of vectors of each matrix. `columns` ends there,
// too, but a loop with two conditions takes fewer registers: with one condition, or with both in a function, softmax's backward spills.
template <class T, int VEC, int K, int N = 1, bool Limited = false> struct HeldVectors {
  using Vector = Packed<T, VEC>;
  Columns<VEC, K> columns;  // of all vectors, including those in shared memory
  int shared_offset = 0;    // byte offset, in shared memory, of all threads' vectors
  int most = 0;
  Vector in_registers[N][K];

  // Loads the vectors that registers hold. at(n, offset) returns the address, in matrix n, of the element `offset` columns behind the
  // thread's first one. Vectors past the end of the row become `missing`.
  template <Hint H, class At> LIGER_DEVICE void load(At&& at, Vector missing = {}) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        in_registers[n][k] = missing;
        if (columns.has(k)) gpu::load<H>(in_registers[n][k], at(n, k * columns.step));
      }
  }
  // Starts the copies of the other vectors to shared memory; for_each_in_shared() waits for them.
  template <Hint H, class At> LIGER_DEVICE void copy_remaining_to_shared(At&& at) const {
#pragma unroll 1
    for (int k = K; (!Limited || k < most) && columns.has(k); ++k)
#pragma unroll
      for (int n = 0; n < N; ++n) copy_to_shared<H>(place(n, k), at(n, k * columns.step));
    close_copies();
  }

  // Calls f(k, x) for each vector x of the thread, or f(k, x, y) for the vectors of two matrices. k: the vector's number in the thread.
  template <class F> LIGER_DEVICE void for_each_in_registers(F&& f) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      for_all_matrices<N>([&](auto... n) { f(k, in_registers[n][k]...); });
    }
  }
  template <class F> LIGER_DEVICE void for_each_in_shared(F&& f) const {
#pragma unroll 1
    for (int k = K; (!Limited || k < most) && columns.has(k); ++k) {
      wait_for_copies(0);  // in the loop: before it, the compiler would make all loads into registers wait, too
      for_all_matrices<N>([&](auto... n) { f(k, *place(n, k)...); });
    }
  }
  template <class F> LIGER_DEVICE void for_each(F&& f) const {
    for_each_in_registers(f);
    for_each_in_shared(f);
  }
  // Calls f(columns, vectors) for several vectors of each matrix at a time: first for the K in registers, then for B at a time of those in
  // shared memory. Vectors past the end of the row are undefined.
  template <int B, class F> LIGER_DEVICE void for_each_batch(F&& f) const {
    f(columns, in_registers);
#pragma unroll 1
    for (int first = K; columns.has(first); first += B) {
      wait_for_copies(0);
      Vector batch[N][B];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int k = 0; k < B; ++k)
          if (columns.has(first + k)) batch[n][k] = *place(n, first + k);
      f(columns.template from<B>(first), batch);
    }
  }

  // Forces the compiler to widen the elements again, instead of keeping them in twice as many registers between the passes.
  LIGER_DEVICE void forget_widened() {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) forget_in_ptxas(in_registers[n][k].data);
  }

 private:
  LIGER_DEVICE Vector* place(int n, int k) const {
    return shared<Vector>(shared_offset) + (((k - K) * N + n) * block_threads() + thread_id());
  }
};

}  // namespace liger::gpu
