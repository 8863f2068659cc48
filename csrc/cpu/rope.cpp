// Rotary embedding on the CPU: bound by memory. An item (cpu/dispatch.h) is one position of a sequence. The position's row of cos and sin
// is converted once, into a buffer in L1, and all heads of q and k use it. Rotary dimensions that exceed the buffer are processed in
// slices. Interleaved pairs are split and joined in buffers as well.
#include "kernels/rope.h"

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

constexpr int64_t slice = 256;  // columns of half a row

// Values for `slice` pairs: [0] for their first elements, [1] for their second elements.
template <class Acc> struct Pairs {
  alignas(vector_bytes) Acc values[2][slice];
  Acc* operator[](int i) { return values[i]; }
  const Acc* operator[](int i) const { return values[i]; }
};
template <class Acc> struct Table {
  Pairs<Acc> cos, sin;
};

// split() reads and join() writes `count` interleaved pairs, from element `at` on.
template <class Acc, class T> LIGER_INLINE void split(Pairs<Acc>& to, const In<T>& from, int64_t at, int64_t count) {
  alignas(vector_bytes) Acc row[2 * slice];
  columns<Acc>(2 * count, [&](int64_t j, auto n) { store<Acc>(row + j, n, load<Acc>(from, at + j, n)); });
  for (int64_t j = 0; j < count; ++j) to[0][j] = row[2 * j], to[1][j] = row[2 * j + 1];
}
template <class Acc, class T> LIGER_INLINE void join(const Out<T>& to, const Pairs<Acc>& from, int64_t at, int64_t count) {
  alignas(vector_bytes) Acc row[2 * slice];
  for (int64_t j = 0; j < count; ++j) row[2 * j] = from[0][j], row[2 * j + 1] = from[1][j];
  columns<Acc>(2 * count, [&](int64_t j, auto n) { store(to, at + j, n, load<Acc>(row + j, n)); });
}
// Reads two runs of `count` elements: from `at`, and from `at + apart`.
template <class Acc, class T> LIGER_INLINE void copy(Pairs<Acc>& to, const In<T>& from, int64_t at, int64_t apart, int64_t count) {
  columns<Acc>(count, [&](int64_t j, auto n) {
    store<Acc>(to[0] + j, n, load<Acc>(from, at + j, n));
    store<Acc>(to[1] + j, n, load<Acc>(from, at + apart + j, n));
  });
}

// Fills the buffer with the cos and sin of a slice. The backward's transpose swaps sin between the halves and negates it. This is done
// here, so that forward and backward share one formula.
template <class Acc>
[[gnu::flatten]] void fill(Table<Acc>& table, const Rope& a, int64_t batch, int64_t position, int64_t first, int64_t count) {
  if (count == 0) return;  // a table without columns may have no memory
  dispatch(a.table_dtype, [&](auto t) {
    const auto pairs = [&](Pairs<Acc>& to, const void* data, int64_t batch_stride, int64_t seq_stride) {
      const In<decltype(t)> from{static_cast<const decltype(t)*>(data) + batch * batch_stride + position * seq_stride};
      if (a.tables_interleaved()) split(to, from, 2 * first, count);
      else copy(to, from, first, a.half_tables ? 0 : a.rotary_dim / 2, count);
    };
    pairs(table.cos, a.cos, a.cos_batch, a.cos_seq);
    pairs(table.sin, a.sin, a.sin_batch, a.sin_seq);
  });
  if (a.transpose)
    columns<Acc>(count, [&](int64_t j, auto n) {
      const auto low = load<Acc>(table.sin[0] + j, n), high = load<Acc>(table.sin[1] + j, n);
      store<Acc>(table.sin[0] + j, n, -high);
      store<Acc>(table.sin[1] + j, n, -low);
    });
}

template <bool Interleaved, class T, class Acc>
[[gnu::flatten]] void rotate(const Table<Acc>& table, const Rope& a, const RopeHeads& heads, int64_t batch, int64_t position, int64_t first,
                             int64_t count, bool stream) {
  if (heads.heads == 0) return;  // q or k may be absent
  const int64_t half = a.rotary_dim / 2;
  const T* in = static_cast<const T*>(heads.in) + batch * heads.in_batch + position * heads.in_seq;
  T* out = static_cast<T*>(heads.out) + batch * heads.out_batch + position * heads.out_seq;
  const bool last = first + count == half;
  for (int64_t head = 0; head < heads.heads; ++head, in += heads.in_head, out += heads.out_head) {
    const In<T> low{in + first}, high{in + half + first}, rest{in};
    const Out<T> low_out{out + first, stream}, high_out{out + half + first, stream}, rest_out{out, stream};
    const auto turn = [&](const auto& low, const auto& high, const auto& low_out, const auto& high_out) {
      columns<Acc>(count, [&](int64_t j, auto n) {
        const auto x = load<Acc>(low, j, n), y = load<Acc>(high, j, n);
        store(low_out, j, n, x * load<Acc>(table.cos[0] + j, n) - y * load<Acc>(table.sin[0] + j, n));
        store(high_out, j, n, y * load<Acc>(table.cos[1] + j, n) + x * load<Acc>(table.sin[1] + j, n));
      });
    };
    if constexpr (!Interleaved) turn(low, high, low_out, high_out);
    else {
      Pairs<Acc> x, rotated;
      if (a.in_interleaved) split(x, rest, 2 * first, count);
      else copy(x, rest, first, half, count);
      const In<Acc> firsts{x[0]}, seconds{x[1]};
      if (a.out_interleaved) {
        turn(firsts, seconds, Out<Acc>{rotated[0], false}, Out<Acc>{rotated[1], false});
        join(rest_out, rotated, 2 * first, count);
      } else turn(firsts, seconds, low_out, high_out);
    }
    if (last) columns<Acc>(a.rotary_dim, a.head_dim, [&](int64_t j, auto n) { store(rest_out, j, n, load<Acc>(rest, j, n)); });
  }
}

// Returns whether the output is large and every vector of every head aligned, so that stores may bypass the caches.
bool heads_stream(const Rope& a, const RopeHeads& heads) {
  const int64_t size = dtype_bytes(a.dtype), half = a.rotary_dim / 2;
  const MutableRows rows{heads.out, heads.out_head, a.dtype};
  return streams(rows, a.batch * a.seq * heads.heads, a.head_dim) && heads.out_seq * size % vector_bytes == 0 &&
         heads.out_batch * size % vector_bytes == 0 && half * size % vector_bytes == 0;
}

template <bool Interleaved, class T, class Acc> void run_positions(const Rope& a, int64_t begin, int64_t end) {
  const bool stream_q = heads_stream(a, a.q), stream_k = heads_stream(a, a.k);
  const int64_t half = a.rotary_dim / 2;
  Table<Acc> table;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item / a.seq, position = item % a.seq;
    int64_t first = 0;
    do {  // runs once if rotary_dim is 0, to copy the heads
      const int64_t count = half - first < slice ? half - first : slice;
      fill(table, a, batch, position, first, count);
      rotate<Interleaved, T>(table, a, a.q, batch, position, first, count, stream_q);
      rotate<Interleaved, T>(table, a, a.k, batch, position, first, count, stream_k);
      first += count;
    } while (first < half);
  }
  if (stream_q || stream_k) stream_fence();
}

}  // namespace

// Items are positions: batch * seq of them.
template <> void run(const Rope& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.in_interleaved || a.out_interleaved) run_positions<true, T, accumulator_type<T>>(a, begin, end);
    else run_positions<false, T, accumulator_type<T>>(a, begin, end);
  });
}

}  // namespace liger::cpu::LIGER_ISA
