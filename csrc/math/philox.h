// Philox4x32-7, a counter-based generator of random numbers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), and the
// mask of dropout that it generates, as templates that CPU vectors and GPU scalars share.
//
// By that paper seven rounds are the fewest that pass all tests of BigCrush. Its default, ten, leaves a margin, which a mask does not need.
//
// V is uint32_t or a vector of them: one counter, or one for each lane. M is the backend's arithmetic:
//   void product(uint32_t m, V v, V& high, V& low)   the upper and the lower 32 bits of m * v
#pragma once
#include <cstdint>

#include "math/qualifiers.h"

namespace liger::math {

template <class M, class V> LIGER_FN void philox(V (&counter)[4], uint64_t key) {
  uint32_t low_key = uint32_t(key), high_key = uint32_t(key >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 7; ++round) {
    V high[2], low[2];
    M::product(0xD2511F53u, counter[0], high[0], low[0]);
    M::product(0xCD9E8D57u, counter[2], high[1], low[1]);
    counter[0] = high[1] ^ counter[1] ^ low_key;
    counter[2] = high[0] ^ counter[3] ^ high_key;
    counter[1] = low[1];
    counter[3] = low[0];
    low_key += 0x9E3779B9u;
    high_key += 0xBB67AE85u;
  }
}

// The random numbers of columns 8 * group to 8 * group + 7 of a row, 16 bits each: the lower half of words[0] first.
template <class M, class V> LIGER_FN void dropout_numbers(V (&words)[4], V group, uint64_t row, uint32_t stream, uint64_t seed) {
  words[0] = group;
  words[1] = V{} + uint32_t(row);
  words[2] = V{} + uint32_t(row >> 32);
  words[3] = V{} + stream;
  philox<M>(words, seed);
}

}  // namespace liger::math
