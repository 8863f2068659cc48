// Dropout with a seed on the CPU, bound by arithmetic. Eight counters at a time yield the random numbers of 64 neighbouring columns.
#include "kernels/seeded_dropout.h"

#include "cpu/simd.h"
#include "math/philox.h"

namespace liger::cpu::LIGER_ISA {
namespace {

constexpr int counters = 8, block = 8 * counters;  // block: columns

struct Arithmetic {
  using V = vector<uint32_t, counters>;
  static LIGER_INLINE void product(uint32_t m, V v, V& high, V& low) {
    const auto wide = __builtin_convertvector(v, vector<uint64_t, counters>) * uint64_t{m};
    high = __builtin_convertvector(wide >> 32, V);
    low = v * m;
  }
};

LIGER_INLINE void numbers(uint16_t (&out)[block], int64_t column, uint64_t row, uint32_t stream, uint64_t seed) {
  Arithmetic::V group, words[4];
  for (int i = 0; i < counters; ++i) group[i] = uint32_t(column / 8 + i);
  math::dropout_numbers<Arithmetic>(words, group, row, stream, seed);
  for (int i = 0; i < block; ++i) out[i] = uint16_t(words[i / 2 % 4][i / 8] >> (i % 2 * 16));
}

template <class T, class Acc> [[gnu::flatten]] void drop(const SeededDropout& a, int64_t begin, int64_t end) {
  using Bits = vector<std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t>, lanes<Acc>>;
  const auto seed = static_cast<uint64_t>(*a.seed);
  for (int64_t i = begin; i < end; ++i) {
    const auto total = row<T>(a.out, i);
    const auto previous = row<T>(Rows{a.out.data, a.out.stride, a.out.dtype}, i);
    for (int64_t first = 0; first < a.cols; first += block) {
      const int64_t last = first + block < a.cols ? first + block : a.cols;
      Acc sums[block];
      if (a.add) columns<Acc>(first, last, [&](int64_t j, auto n) { store<Acc>(sums + (j - first), Whole{}, load<Acc>(previous, j, n)); });
      for (int64_t mask = 0; mask < a.count; ++mask) {
        const auto x = row<T>(Rows(a.x), a.add ? mask * a.rows + i : i);
        const auto out = row<T>(a.out, a.add ? i : mask * a.rows + i);
        uint16_t random[block];
        numbers(random, first, static_cast<uint64_t>(a.first_row) + static_cast<uint64_t>(i), a.stream + uint32_t(mask), seed);
        columns<Acc>(first, last, [&](int64_t j, auto n) {
          const auto number = __builtin_convertvector(load_bytes<vector<uint16_t, lanes<Acc>>>(random + (j - first)), Bits);
          const vec<Acc> scaled = rounded(load<Acc>(x, j, n) * Acc(a.scale));
          const vec<Acc> dropped = number >= static_cast<int32_t>(a.threshold) ? scaled : vec<Acc>{};
          Acc* const sum = sums + (j - first);
          if (a.add) store<Acc>(sum, Whole{}, load<Acc>(sum, Whole{}) + dropped);
          else store(out, j, n, dropped);
        });
      }
      if (a.add) columns<Acc>(first, last, [&](int64_t j, auto n) { store(total, j, n, load<Acc>(sums + (j - first), Whole{})); });
    }
  }
}

}  // namespace

template <> void run(const SeededDropout& a, int64_t begin, int64_t end) {
  dispatch_same({a.out.dtype, a.x.dtype}, [&](auto t, auto accumulator) { drop<decltype(t), decltype(accumulator)>(a, begin, end); });
}

}  // namespace liger::cpu::LIGER_ISA
