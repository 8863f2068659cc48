// Elementary functions on vec<Acc>; part of cpu/simd.h, which includes this file. fp32 uses polynomials that were fitted for a small
// relative error. The largest errors over dense sweeps, in ulp:
//   exp          1.0 (subnormal results 0.8)
//   tanh         1.3
//   normal_cdf   1.4 for x >= 0, 3.1 in [-1, 0], 8.3 in [-3, -1], 12 in [-5, -3]; below -5 it grows with x^2, to about 70 near -12
// fp64 calls the C library for each lane.
#pragma once

namespace liger::cpu::LIGER_ISA {

template <class V, class S, class... Rest> LIGER_INLINE V horner(V x, S first, Rest... rest) {
  if constexpr (sizeof...(Rest) == 0) return V{} + first;
  else return horner(x, rest...) * x + first;
}

// Returns v * 2^n with subnormal results and overflow to infinity; n = shifted - 1.5 * 2^23, an integer in [-252, 254].
LIGER_INLINE vec<float> scale_by_power(vec<float> v, vec<float> shifted) {
#if defined(__AVX512F__)
  return bit_cast<vec<float>>(_mm512_scalef_ps(bit_cast<__m512>(v), bit_cast<__m512>(shifted - 12582912.0f)));
#else
  // Two factors, since 2^n itself may be out of range.
  using I = vector<int32_t, lanes<float>>;
  const I n = bit_cast<I>(shifted) - 0x4b400000, half = n >> 1;
  return v * bit_cast<vec<float>>((half + 127) << 23) * bit_cast<vec<float>>((n - half + 127) << 23);
#endif
}

template <class Acc> struct Math;

template <> struct Math<float> {
  using scalar = float;
  using V = vec<float>;

  static LIGER_INLINE V exp(V x) {
    // Beyond these bounds the result is infinity, or rounds to 0; a NaN passes both bounds.
    x = greater(splat(-104.0f), lesser(splat(89.0f), x));
    // n = round(x / ln 2): adding 1.5 * 2^23 leaves n in the low bits. ln 2 is split in two, so that n * high is exact.
    const V shifted = x * 1.44269504f + 12582912.0f;
    const V n = shifted - 12582912.0f;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const V tail = horner(r, 4.999999404e-01f, 1.666652113e-01f, 4.166838899e-02f, 8.368745446e-03f, 1.381453942e-03f);
    const V p = tail * (r * r) + r + 1.0f;
    return scale_by_power(p, shifted);
  }

  static LIGER_INLINE V tanh(V x) {
    const V t = x < 0.0f ? -x : x;
    const V z = t * t;
    const V small = horner(z, -3.333327770e-01f, 1.333132833e-01f, -5.372922868e-02f, 2.060200647e-02f, -5.660788622e-03f) * z * t + t;
    const V large = 1.0f - 2.0f / (exp(t + t) + 1.0f);
    const V magnitude = t < 0.625f ? small : large;
    return x < 0.0f ? -magnitude : x == 0.0f ? x : magnitude;
  }

  // Left of -1, Phi(-t) = exp(-t^2 / 2) * P(u) / (t + 2.5) with u = (t - 2.5) / (t + 2.5): the tail is not a difference, so
  // it keeps its relative precision. Right of 1, 1 minus the tail. Between, 0.5 plus an odd polynomial.
  static LIGER_INLINE V normal_cdf(V x) {
    const V t = x < 0.0f ? -x : x, square = x * x;
    const V inverse = 1.0f / (t + 2.5f), u = 1.0f - 5.0f * inverse;
    const V p = horner(u, 7.066566348e-01f, -4.336920083e-01f, 1.319869608e-01f, 9.235914797e-03f, -1.638602093e-02f, -1.600961084e-03f,
                       2.523296745e-03f, 6.843443261e-04f, -3.108644451e-04f, -1.572664332e-04f);
    const V tail = exp(-0.5f * square) * (p * inverse);
    const V middle =
        horner(square, 3.989422917e-01f, -6.649035960e-02f, 9.973322973e-03f, -1.186329871e-03f, 1.134863487e-04f, -7.654199180e-06f) * x +
        0.5f;
    return t < 1.0f ? middle : x > 0.0f ? 1.0f - tail : tail;
  }

  static LIGER_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
  static LIGER_INLINE float log(float x) { return __builtin_logf(x); }
  static LIGER_INLINE float exp_scalar(float x) { return __builtin_expf(x); }
};

template <> struct Math<double> {
  using scalar = double;
  using V = vec<double>;

  template <class F> static LIGER_INLINE V each(V x, F f) {
    for (int i = 0; i < lanes<double>; ++i) x[i] = f(x[i]);
    return x;
  }
  static LIGER_INLINE V exp(V x) {
    return each(x, [](double v) { return __builtin_exp(v); });
  }
  static LIGER_INLINE V tanh(V x) {
    return each(x, [](double v) { return __builtin_tanh(v); });
  }
  static LIGER_INLINE V normal_cdf(V x) {
    return each(x, [](double v) { return 0.5 * __builtin_erfc(v * -0.7071067811865476); });
  }

  static LIGER_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
  static LIGER_INLINE double log(double x) { return __builtin_log(x); }
  static LIGER_INLINE double exp_scalar(double x) { return __builtin_exp(x); }
};

}  // namespace liger::cpu::LIGER_ISA
