// Online softmax: the maximum and the sum of exponentials of some elements, which can be extended by more elements, merged with the
// statistics of other threads, and stored as two floats.
#pragma once
#include "gpu/rows.h"

namespace liger::gpu {

// The maximum of some elements, and the sum of exp(x - base()) over them. The maximum ignores NaN; the sum becomes NaN.
struct Exponentials {
  float max = minus_infinity(), sum = 0;

  // While the maximum is -inf, exponentials are relative to 0, since -inf - -inf is NaN.
  LIGER_DEVICE float base() const { return max == minus_infinity() ? 0.f : max; }
  LIGER_DEVICE float log_sum() const { return logf(sum); }

  // Merges the statistics of other elements into these. Commutative, as RowGroup's reduce() requires. T: the type of the result, which
  // determines how exact the factor of the sum with the smaller maximum is (exp_as).
  template <class T> LIGER_DEVICE void join(const Exponentials& others) {
    const float smaller = exp_as<T>(max == others.max ? 0 : -fabsf(max - others.max));
    sum = max >= others.max ? sum + others.sum * smaller : sum * smaller + others.sum;
    max = fmaxf(max, others.max);
  }
  // Rescales the sum to a maximum that is at least as large.
  template <class T> LIGER_DEVICE void rescale(float larger) {
    sum *= exp_as<T>(max == larger ? 0 : max - larger);
    max = larger;
  }
  // Merges the statistics of all threads of a row. All threads end with the same bits.
  template <class T, class Group> LIGER_DEVICE void merge(Group& group) {
    float pair[2] = {max, sum};
    group.reduce(pair, [](float (&a)[2], const float (&b)[2]) {
      Exponentials both{a[0], a[1]};
      both.join<T>({b[0], b[1]});
      a[0] = both.max, a[1] = both.sum;
    });
    *this = {pair[0], pair[1]};
  }
};

// Exponentials that are extended by vectors, each time relative to the maximum so far.
template <class T> struct VectorExponentials : Exponentials {
  // Starts with the vectors k of a row for which has(k) is true.
  template <int VEC, int K, class F> LIGER_DEVICE VectorExponentials(const Packed<T, VEC> (&x)[1][K], F has) {
    max = largest(x[0], has);
    sum = exponential_sum(x[0], has);
  }
  template <int VEC, int K, class F> LIGER_DEVICE void add(const Packed<T, VEC> (&x)[1][K], F has) {
    const float found = largest(x[0], has);
    if (found > max) rescale<T>(found);
    sum += exponential_sum(x[0], has);
  }

 private:
  // Sums each vector by itself first, so that the large sum is rounded fewer times.
  template <int VEC, int K, class F> LIGER_DEVICE float exponential_sum(const Packed<T, VEC> (&x)[K], F has) const {
    float total = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!has(k)) continue;
      float part = 0;
#pragma unroll
      for (int i = 0; i < VEC; ++i) part += exp_as<T>(x[k][i] - base());
      total += part;
    }
    return total;
  }
};

}  // namespace liger::gpu
