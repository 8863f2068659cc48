// Online softmax: what is known of a softmax over some elements, which can be extended by more of them, merged with that of others, and
// stored as two floats.
#pragma once
#include "gpu/rows.h"

namespace liger::gpu {

// a[0] is a maximum, a[1] the sum of exp(x - a[0]) over some elements, and b the same over others. Afterwards a holds both for all of these
// elements. Commutative, as RowGroup's `combine` has to be. T: exponentials are as exact as this type can tell (exp_as).
template <class T, int N> LIGER_DEVICE void join_exponentials(float (&a)[N], const float (&b)[N]) {
  const float smaller = exp_as<T>(a[0] == b[0] ? 0 : -fabsf(a[0] - b[0]));
  a[1] = a[0] >= b[0] ? a[1] + b[1] * smaller : a[1] * smaller + b[1];
  a[0] = fmaxf(a[0], b[0]);
}

// The maximum of some elements, and the sum of their exponentials relative to it. Maxima drop NaN, which reaches the sum. While the maximum
// is -inf, exponentials are relative to 0, since -inf - -inf is NaN.
template <class T> struct Exponentials {
  float max, sum;

  // Over the vectors k of a row for which has(k).
  template <int VEC, int K, class F> LIGER_DEVICE Exponentials(const Packed<T, VEC> (&x)[1][K], F has) : max(largest(x[0], has)) {
    sum = sum_of(x[0], has);
  }
  template <int VEC, int K, class F> LIGER_DEVICE void add(const Packed<T, VEC> (&x)[1][K], F has) {
    const float found = largest(x[0], has);
    if (found > max) {
      sum *= exp_as<T>(max - found);
      max = found;
    }
    sum += sum_of(x[0], has);
  }
  // Joins those of all threads of a row: all get the same bits.
  template <class Group> LIGER_DEVICE void merge(Group& group) {
    float pair[2] = {max, sum};
    group.reduce(pair, [](float (&a)[2], const float (&b)[2]) { join_exponentials<T>(a, b); });
    max = pair[0];
    sum = pair[1];
  }

 private:
  // Each vector is summed by itself first, so that the large sum is rounded fewer times.
  template <int VEC, int K, class F> LIGER_DEVICE float sum_of(const Packed<T, VEC> (&x)[K], F has) const {
    const float base = max == minus_infinity() ? 0 : max;
    float total = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!has(k)) continue;
      float part = 0;
#pragma unroll
      for (int i = 0; i < VEC; ++i) part += exp_as<T>(x[k][i] - base);
      total += part;
    }
    return total;
  }
};

}  // namespace liger::gpu
