// Activations and their derivatives, as templates that CPU vectors and GPU scalars share.
//
// V is a float, a double or a SIMD vector of them. M is the backend's arithmetic, a struct of static functions on V:
//   using scalar = float or double;   V exp(V);   V tanh(V);   V normal_cdf(V)   (Phi, the standard normal distribution)
// So a GPU can choose its fast instructions, and overload resolution cannot choose another function by accident.
// The usual formulas with 1 + tanh or 1 + erf subtract nearly equal numbers for negative x; the formulas here are equivalent and avoid
// this. With the template argument `exact` they also avoid 1 - sigmoid for positive x, with a few more instructions. 16-bit results are too
// coarse to benefit from `exact`.
#pragma once
#include "math/qualifiers.h"

namespace liger::math {

template <class V> struct ValueAndSlope {
  V value, slope;
};

template <class M, class V> LIGER_FN V sigmoid(V x) {
  using S = typename M::scalar;
  return S(1) / (S(1) + M::exp(-x));
}

// x * sigmoid(v) and its derivative, computed from the smaller one of sigmoid(v) and 1 - sigmoid(v). dv: x times the derivative of v.
template <class M, class V> LIGER_FN ValueAndSlope<V> sigmoid_times(V x, V v, V dv) {
  using S = typename M::scalar;
  const V e = M::exp(v < S(0) ? v : -v), smaller = e / (S(1) + e);
  const V change = smaller > S(0) ? dv * (smaller * (S(1) - smaller)) : V{};  // dv may be infinite
  return {x * (v < S(0) ? smaller : S(1) - smaller), v < S(0) ? smaller + change : S(1) + (change - smaller)};
}

// x * sigmoid(x); arXiv:1702.03118.
template <class M, bool exact> struct Silu {
  template <class V> static LIGER_FN V value(V x) {
    if constexpr (exact) return value_and_slope(x).value;
    else return x * sigmoid<M>(x);
  }
  template <class V> static LIGER_FN ValueAndSlope<V> value_and_slope(V x) {
    using S = typename M::scalar;
    if constexpr (exact) return sigmoid_times<M>(x, x, x);
    const V s = sigmoid<M>(x);
    return {x * s, s * (S(1) + x * (S(1) - s))};
  }
};

// 0.5 * x * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 * x^3); arXiv:1606.08415. Computed as x * sigmoid(2 * u), which is the
// same function.
template <class M, bool exact> struct GeluTanh {
  using S = typename M::scalar;
  static constexpr S slope0 = S(1.5957691216057308), cubic = S(0.044715);  // 2 * sqrt(2 / pi)

  template <class V> static LIGER_FN V value(V x) {
    if constexpr (exact) return value_and_slope(x).value;
    else return x * sigmoid<M>(slope0 * x * (S(1) + cubic * (x * x)));
  }
  template <class V> static LIGER_FN ValueAndSlope<V> value_and_slope(V x) {
    const V square = cubic * (x * x);
    if constexpr (exact) {
      const V scaled = slope0 * x;
      return sigmoid_times<M, V>(x, scaled + scaled * square, scaled + scaled * (S(3) * square));
    }
    const V s = sigmoid<M>(slope0 * x * (S(1) + square));
    return {x * s, s + x * s * (S(1) - s) * (slope0 * (S(1) + S(3) * square))};
  }
};

// x * Phi(x); arXiv:1606.08415.
template <class M, bool> struct Gelu {
  template <class V> static LIGER_FN V value(V x) { return x * M::normal_cdf(x); }
  template <class V> static LIGER_FN ValueAndSlope<V> value_and_slope(V x) {
    using S = typename M::scalar;
    const V cdf = M::normal_cdf(x);
    const V density = S(0.3989422804014327) * M::exp(S(-0.5) * (x * x));  // 1 / sqrt(2 * pi)
    return {x * cdf, cdf + x * density};
  }
};

}  // namespace liger::math
