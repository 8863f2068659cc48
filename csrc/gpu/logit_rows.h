// The arguments that the cross entropy kernels share, and the exponential and the softcap of single logits.
#pragma once
#include <climits>
#include <cmath>

#include "gpu/device.h"
#include "gpu/rows.h"
#include "kernels/cross_entropy.h"

namespace liger::gpu {

// vocab: the number of all classes; for Statistics and Backward, of the columns of their chunk.
struct LogitRows {
  int64_t rows, vocab, first_row, stride;
  const void* logits;
  const int64_t* target;
  Vector class_weight;
  const float* counts;
  int64_t ignore_index;
  float hard_share, class_share;  // 1 - label_smoothing; label_smoothing / number of all classes, also for a chunk
  float lse_square_scale, softcap, inverse_softcap;  // inverse_softcap: logit_scale / softcap
  const float* temperature;  // nullptr: ones
  float logit_scale;
  bool token_scaling, moments;
  int threads_per_row;
  TargetReport report;

  LIGER_DEVICE bool scales() const { return temperature != nullptr || logit_scale != 1; }
  LIGER_DEVICE bool is_class(int64_t target) const { return target != ignore_index && target >= 0 && target < vocab; }
};

// exp(x - base) for many x and one base. For 16-bit logits it takes one multiply-add and one exponential: exp2(x * log2(e) + offset). The
// offset, -base * log2(e), is rounded, which multiplies all values of one base by the same factor. correction() is the inverse of that
// factor, for a sum or a scale. If |base| is 2^20 or more, neighbouring 16-bit logits are so far apart that exponentials are 1 or 0: the
// slope is then 1, with which nothing is rounded. low: the part of the base that its rounding to fp32 lost. For fp32 logits low is
// subtracted in each exponent, since as a factor it would be rounded again.
// scale, for 16-bit logits: the exponentials are exp((x - base) * scale). The slope of a far base is then a power of two.
template <class T> struct Exp {
  static constexpr bool in_one_step = sizeof(T) == 2;
  float slope, offset, low;
  LIGER_DEVICE explicit Exp(float base, float low = 0, float scale = 1)
      : slope(in_one_step && fabsf(base * scale) < 0x1p20f ? log2_e * scale : bit_cast<float>(bit_cast<int>(scale) & 0x7f800000)),
        offset(-base * slope),
        low(low) {}
  LIGER_DEVICE float exponent(float x) const { return fmaf(x, slope, offset); }
  LIGER_DEVICE float operator()(float x) const {
    if constexpr (in_one_step) return fast_exp2(exponent(x));
    else return expf(x + offset - low);
  }
  LIGER_DEVICE bool far() const { return in_one_step && slope == 1; }
  // The same if far() is false and scale is 1: the slope is a compile-time constant, which saves registers in a kernel that holds a row.
  LIGER_DEVICE float near(float x) const {
    if constexpr (in_one_step) return fast_exp2(fmaf(x, log2_e, offset));
    else return (*this)(x);
  }
  LIGER_DEVICE float correction(float base) const { return in_one_step ? fast_exp2(-exponent(base)) * exp_as<T>(-low) : 1.f; }
};
constexpr float ln_2 = 0.69314718055994531f;
LIGER_DEVICE float not_a_number() { return bit_cast<float>(0x7fc00000u); }

// tanh(t) for |t| <= 1, with a relative error of at most 2^-22.7: t times a polynomial of t^2 that was fitted to the relative error.
LIGER_DEVICE float tanh_within_one(float t) {
  const float s = t * t;
  float p = 0.0010335268f;
  p = fmaf(p, s, -0.006180637f);
  p = fmaf(p, s, 0.020264039f);
  p = fmaf(p, s, -0.05344334f);
  p = fmaf(p, s, 0.13324876f);
  p = fmaf(p, s, -0.3333281f);
  p = fmaf(p, s, 0.99999994f);
  return t * p;
}
// tanh(t) for |t| >= 1.
LIGER_DEVICE float tanh_beyond_one(float t) {
  const float magnitude = 1 - 2 * fast_reciprocal(1 + fast_exp2(fabsf(t) * (2 * log2_e)));
  return t < 0 ? -magnitude : magnitude;
}
// x[j] = tanh(x[j] * inverse_softcap). Few 16-bit logits are larger than the softcap, and for the others a polynomial takes half of the
// instructions of tanhf.
template <class T, int N> LIGER_DEVICE void scaled_tanh(const LogitRows& a, float (&x)[N]) {
  float largest = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] *= a.inverse_softcap, largest = fmaxf(largest, fabsf(x[j]));
  if (sizeof(T) == 4 || !may_have_clusters) {  // AMD's scalar registers have no room for the coefficients
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = tanhf(x[j]);
  } else if (largest <= 1) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = tanh_within_one(x[j]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = fabsf(x[j]) > 1 ? tanh_beyond_one(x[j]) : tanh_within_one(x[j]);
  }
}
// x[j] *= factor. For fp32 logits the product is rounded before the subtraction of a base, as the base was: so the largest logit has a
// distance of 0.
template <class T, int N> LIGER_DEVICE void multiply(float (&x)[N], float factor) {
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = sizeof(T) == 4 ? rounded_product(x[j], factor) : x[j] * factor;
}
// x'[j] of logits x[j]: cap() for a softcap (math/softcap.h), transform() with and without one.
template <class T, int N> LIGER_DEVICE void cap(const LogitRows& a, float (&x)[N], float over_temperature = 1) {
  scaled_tanh<T>(a, x);
  multiply<T>(x, a.softcap * over_temperature);
}
template <class T, int N> LIGER_DEVICE void transform(const LogitRows& a, float (&x)[N], float over_temperature) {
  if (a.softcap != 0) return cap<T>(a, x, over_temperature);
  if (a.scales()) multiply<T>(x, a.logit_scale * over_temperature);
}
// The derivative of softcap; share = x' / (softcap * over_temperature).
LIGER_DEVICE float capped_slope(float share) { return 1 - share * share; }

}  // namespace liger::gpu
