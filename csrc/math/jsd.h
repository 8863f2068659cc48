// One column's term of the generalised Jensen-Shannon divergence (kernels/jsd.h) and of its gradient, as templates that CPU vectors and GPU
// scalars share. The template arguments V and M (the backend's arithmetic) are as in math/activation.h. M provides exp(V), the logarithm of
// the mixture, log_mixture(m, rest, c, t, e) with the names of JsdMixture, and log(V) if its log_mixture calls a function of this file.
//
// In formulas, M is the mixture beta * P + (1 - beta) * Q of kernels/jsd.h. For nearly equal probabilities, y - log M in the definition of
// the divergence cancels. Here log M is computed relative to the larger log-probability: with t = |x - y|, and c the weight in the mixture
// of the smaller probability, log M = max(x, y) + log1p(c * expm1(-t)). The second term keeps its relative precision.
#pragma once
#include "math/qualifiers.h"

namespace liger::math {

enum class Divergence { mixture, forward_kl, reverse_kl };
constexpr Divergence divergence_kind(double beta) {
  return beta == 0 ? Divergence::forward_kl : beta == 1 ? Divergence::reverse_kl : Divergence::mixture;
}

// The larger of v and -1e4, so that differences of -inf are finite. Results do not change, because the probability of a smaller logarithm
// is 0 in any dtype. A NaN remains NaN.
template <class M, class V> LIGER_FN V floored(V v) {
  const V floor = V{} + typename M::scalar(-1e4);
  return v < floor ? floor : v;
}

// beta and 1 - beta, each at least fp32's smallest normal number (rounded up), so that JsdMixture::m is never 0.
template <class S> struct JsdWeights {
  S p, q;
  explicit JsdWeights(double beta) : p(at_least_normal(S(beta))), q(at_least_normal(S(1 - beta))) {}
  static S at_least_normal(S v) { return v < S(1.2e-38) ? S(1.2e-38) : v; }
};

// The mixture M of two probabilities, relative to the larger one: m = M / max(P, Q) and its logarithm.
template <class M, class V> struct JsdMixture {
  using S = typename M::scalar;
  V top, t, c, e, m, log_m;  // top: max(x, y); e: exp(-t), the smaller probability relative to the larger one
  LIGER_FN JsdMixture(V x, V y, const JsdWeights<S>& weights) {
    const V d = x - y, p = V{} + weights.p, q = V{} + weights.q;
    top = d <= S(0) ? y : x;
    t = d <= S(0) ? -d : d;
    c = d <= S(0) ? q : p;
    e = M::exp(-t);
    const V rest = d <= S(0) ? p : q;
    m = rest + c * e;
    log_m = M::log_mixture(m, rest, c, t, e);
  }
};

// log1p(c * expm1(-t)) in fp32, where e = exp(-t) and m = 1 - c + c * e: log(m) for m up to 0.75, else polynomials with a relative error of
// 5e-9. `far` is always computed: with a branch per element, a GPU could not compute several elements at once.
template <class M, class V> LIGER_FN V log_mixture(V m, V c, V t, V e) {
  const V far = M::log(m);
  const V small = ((((-1.12372e-3f * t + 8.19e-3f) * t - 4.163024e-2f) * t + 1.6666245e-1f) * t - 4.9999982e-1f) * t + 1.f;
  const V u = c * (t < 0.5f ? -t * small : e - 1.f);
  const V near =
      (((((3.3390906e-1f * u - 8.952039e-2f) * u + 2.1425246e-1f) * u - 2.4869019e-1f) * u + 3.3338976e-1f) * u - 4.999991e-1f) * u + 1.f;
  return u > -0.25f ? u * near : far;
}
// The same for 16-bit log-probabilities, whose nonzero differences are larger: by the first terms of the series, or by the logarithm.
template <class M, class V> LIGER_FN V short_log_mixture(V m, V rest, V c, V t) {
  const V far = M::log(m);
  const V near = c * t * (rest * t * (0.5f - t * (1.f / 6 - c * (1.f / 3))) - 1.f);
  return t < 0.0625f ? near : far;
}

// a > 0 ? a * log(a / b) : 0, computed from log_a and log_b.
template <class M, class V> LIGER_FN V kl_term(V log_a, V log_b) {
  const V a = M::exp(log_a);
  return a * (floored<M>(log_a) - (a > typename M::scalar(0) ? log_b : floored<M>(log_b)));
}

// The term that a column adds to its row's divergence.
template <class M, Divergence divergence, class V> LIGER_FN V jsd_term(V x, V y, const JsdWeights<typename M::scalar>& weights) {
  if constexpr (divergence == Divergence::forward_kl) return kl_term<M>(y, x);
  else if constexpr (divergence == Divergence::reverse_kl) return kl_term<M>(x, y);
  else {
    const JsdMixture<M, V> mixture(floored<M>(x), floored<M>(y), weights);
    return M::exp(mixture.top) * (-mixture.m * mixture.log_m - mixture.c * mixture.e * mixture.t);
  }
}

// The derivative of the row's divergence with respect to x.
template <class M, Divergence divergence, class V> LIGER_FN V jsd_slope(V x, V y, const JsdWeights<typename M::scalar>& weights) {
  using S = typename M::scalar;
  if constexpr (divergence == Divergence::forward_kl) return -M::exp(y);
  else if constexpr (divergence == Divergence::reverse_kl) return kl_term<M>(x, y) + M::exp(x);
  else {
    const V least_x = floored<M>(x);
    const JsdMixture<M, V> mixture(least_x, floored<M>(y), weights);
    // x - log M
    const V excess = least_x - mixture.top - mixture.log_m;
    return weights.q * M::exp(x) * excess;
  }
}

}  // namespace liger::math
