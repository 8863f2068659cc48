// Rotary embedding on the CPU: bound by memory. An item is one position of the sequence: its row of cos and sin is converted once,
// into a buffer that stays in L1, and then used by all heads of q and k. Rotary dimensions beyond the buffer are taken in slices.
#include "kernels/rope.h"

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

constexpr int64_t slice = 256;  // columns of half a row

template <class A> struct Table {
  alignas(vector_bytes) A cos[2][slice], sin[2][slice];  // [0]: first half of the row, [1]: second
};

// The transpose swaps sin between the halves and negates it: with that done here, both directions are one formula.
template <class A>
[[gnu::flatten]] void fill(Table<A>& table, const Rope& a, int64_t batch, int64_t position, int64_t first, int64_t count) {
  if (count == 0) return;  // a table without columns has no address
  const auto cos = row<any>(Rows{a.cos, a.cos_seq, a.table_dtype}, position);
  const auto sin = row<any>(Rows{a.sin, a.sin_seq, a.table_dtype}, position);
  const int64_t cos_at = batch * a.cos_batch + first, sin_at = batch * a.sin_batch + first, half = a.rotary_dim / 2;
  columns<A>(count, [&](int64_t j, auto n) {
    store<A>(table.cos[0] + j, n, load<A>(cos, cos_at + j, n));
    store<A>(table.cos[1] + j, n, load<A>(cos, cos_at + half + j, n));
    const auto low = load<A>(sin, sin_at + j, n), high = load<A>(sin, sin_at + half + j, n);
    store<A>(table.sin[0] + j, n, a.transpose ? -high : low);
    store<A>(table.sin[1] + j, n, a.transpose ? -low : high);
  });
}

template <class T, class A>
[[gnu::flatten]] void rotate(const Table<A>& table, const Rope& a, const RopeHeads& heads, int64_t batch, int64_t position, int64_t first,
                             int64_t count, bool stream) {
  if (heads.heads == 0) return;  // no memory either
  const int64_t half = a.rotary_dim / 2;
  const T* in = static_cast<const T*>(heads.in) + batch * heads.in_batch + position * heads.in_seq;
  T* out = static_cast<T*>(heads.out) + batch * heads.out_batch + position * heads.out_seq;
  const bool last = first + count == half;
  for (int64_t head = 0; head < heads.heads; ++head, in += heads.in_head, out += heads.out_head) {
    const In<T> low{in + first}, high{in + half + first}, rest{in};
    const Out<T> low_out{out + first, stream}, high_out{out + half + first, stream}, rest_out{out, stream};
    columns<A>(count, [&](int64_t j, auto n) {
      const auto x = load<A>(low, j, n), y = load<A>(high, j, n);
      store(low_out, j, n, x * load<A>(table.cos[0] + j, n) - y * load<A>(table.sin[0] + j, n));
      store(high_out, j, n, y * load<A>(table.cos[1] + j, n) + x * load<A>(table.sin[1] + j, n));
    });
    if (last) columns<A>(a.rotary_dim, a.head_dim, [&](int64_t j, auto n) { store(rest_out, j, n, load<A>(rest, j, n)); });
  }
}

// Is every vector of every head aligned, so that a large output may be written around the caches?
bool heads_stream(const Rope& a, const RopeHeads& heads) {
  const int64_t size = size_of(a.dtype), half = a.rotary_dim / 2;
  const MutableRows rows{heads.out, heads.out_head, a.dtype};
  return streams(rows, a.batch * a.seq * heads.heads, a.head_dim) && heads.out_seq * size % vector_bytes == 0 &&
         heads.out_batch * size % vector_bytes == 0 && half * size % vector_bytes == 0;
}

template <class T, class A> void run_positions(const Rope& a, int64_t begin, int64_t end) {
  const bool stream_q = heads_stream(a, a.q), stream_k = heads_stream(a, a.k);
  const int64_t half = a.rotary_dim / 2;
  Table<A> table;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item / a.seq, position = item % a.seq;
    int64_t first = 0;
    do {  // once also when rotary_dim is 0: everything is copied
      const int64_t count = half - first < slice ? half - first : slice;
      fill(table, a, batch, position, first, count);
      rotate<T>(table, a, a.q, batch, position, first, count, stream_q);
      rotate<T>(table, a, a.k, batch, position, first, count, stream_k);
      first += count;
    } while (first < half);
  }
  if (stream_q || stream_k) stream_fence();
}

}  // namespace

// Items are positions: batch * seq of them.
template <> void run(const Rope& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, [&](auto t) { run_positions<decltype(t), accumulator_of<decltype(t)>>(a, begin, end); });
}

}  // namespace liger::cpu::LIGER_ISA
