// Statistics and gradients of a row of logits that a thread group holds (HeldLogits), for the in-place kernels: functions for losses
// without options, and HeldOptions for options that cost instructions per element.
#pragma once
#include "gpu/held_logits.h"

namespace liger::gpu {

// The number of elements of a Packed, as a compile-time constant.
template <class P> constexpr int packed_elements = std::remove_cvref_t<P>::elements;

template <class P, class F> LIGER_DEVICE P map_elements(const P& raw, F f) {
  float g[P::elements];
#pragma unroll
  for (int j = 0; j < P::elements; ++j) g[j] = f(raw[j]);
  P out;
  out.set(g);
  return out;
}

// Returns the exponentials of a thread's part of a row, relative to the thread's own maximum: so the threads of the row exchange values
// once, not twice.
template <class T, class Held> LIGER_DEVICE Exponentials thread_exponentials(Held& held) {
  Exponentials all{held.largest()};
  const Exp<T> exp(all.base());
  if (!exp.far()) all.sum = held.sum([&](float logit) { return exp.near(logit); });
  else
    held.read_again([&](const auto& raw, int, const T*) {
      for (int j = 0; j < packed_elements<decltype(raw)>; ++j) all.sum += exp(raw[j]);
    });
  all.sum *= exp.correction(all.base());
  return all;
}

// Overwrites a row by factor * exp(logit - base), with as few instructions per element as possible. near_slope: the slope of `exp` for a
// base that is not far; a compile-time constant if the caller passes one.
template <class T, class Held> LIGER_DEVICE void replace_by_probabilities(Held& held, const Exp<T>& exp, float factor, float near_slope) {
  const auto product = [&](float logit) { return factor * exp(logit); };
  if constexpr (!Exp<T>::in_one_step) {
    held.replace([&](const auto& raw, int) { return map_elements(raw, product); });
  } else if (factor > 0 && fabsf(exp.offset) < 1024) {
    // The factor as part of the exponent saves a multiplication per element. Below 1024 an exponent has at least 14 fractional bits.
    const float exponent = exp.offset + log2f(factor);
    held.replace(
        [&](const auto& raw, int) { return map_elements(raw, [&](float logit) { return fast_exp2(logit * near_slope + exponent); }); });
  } else {
    held.read_again([&](const auto& raw, int, T* address) { store(address, map_elements(raw, product)); });
  }
}

// x[j] = softcap(x[j]) * log2(e): exponents of 2. The sum of exponentials and the target's logit of a row are both computed from these
// values, so that a probability of 1 has a loss of 0.
template <class T, int N> LIGER_DEVICE void capped_exponents(const LogitRows& a, float (&x)[N]) {
  scaled_tanh<T>(a, x);
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] *= a.softcap * log2_e;
}
template <class T> LIGER_DEVICE float capped_exponent(const LogitRows& a, float logit) {
  float x[1] = {logit};
  capped_exponents<T>(a, x);
  return x[0];
}

// The statistics of a row of 16-bit logits x' (softcap(x), or x) that options need in addition to exponentials.
template <class T> struct HeldOptions {
  const LogitRows& a;
  float raw_max = minus_infinity();  // of x, for predictions
  float weighted = 0;  // label smoothing: sum of w[j] * (x'[j] - anchor); w[j] = 1 without class weights
  float anchor = 0, weights = 0;  // weights: the sum of w
  int best_column = 0;

  // Computes the statistics of a thread's part of the row.
  template <class Held> LIGER_DEVICE void take(Held& held, Exponentials& row) {
    if (a.softcap == 0) {
      row = thread_exponentials<T>(held);
      raw_max = row.max;
    } else {
      take_capped(held, row);
    }
    if (a.class_share == 0 || (a.softcap != 0 && !a.class_weight.data)) return;
    anchor = finite(row.max);
    weighted = weights = 0;
    held.for_each([&](const auto& raw, int column) {
      float x[packed_elements<decltype(raw)>], part = 0, part_weights = packed_elements<decltype(raw)>;
      widen(x, raw);
      if (a.class_weight.data) {
        if (a.softcap != 0) cap<T>(a, x);
        float w[packed_elements<decltype(raw)>];
        RowStatistics<T, true>::template class_weights<true>(a, w, column);
        part_weights = 0;
#pragma unroll
        for (int j = 0; j < packed_elements<decltype(raw)>; ++j) part += w[j] * (x[j] - anchor), part_weights += w[j];
      } else {
#pragma unroll
        for (int j = 0; j < packed_elements<decltype(raw)>; ++j) part += x[j] - anchor;
      }
      weighted += part;
      weights += part_weights;
    });
  }

  // Merges the statistics of a row's threads, after their exponentials have been merged. target_logit: read in the thread that owns the
  // target; afterwards all threads have it if an option needs it.
  template <class Held, class Group>
  LIGER_DEVICE void merge(const Held& held, Group& group, const Exponentials& row, bool has_target, float& target_logit, bool want_best) {
    if (a.class_share != 0 || a.token_scaling) {
      const float common = finite(row.max);
      float both[2] = {weighted + weights * (anchor - common), has_target ? target_logit : minus_infinity()};
      group.reduce(both, [](float (&to)[2], const float (&from)[2]) { to[0] += from[0], to[1] = max_nan(to[1], from[1]); });
      target_logit = both[1];
      weighted = both[0];
      if (a.class_share != 0) weighted += a.counts[CrossEntropyCounts::weight] * (common - finite(target_logit));
    }
    if (!want_best) return;
    float tops[2] = {raw_max, 0};
    group.reduce(tops, [](float (&to)[2], const float (&from)[2]) { to[0] = fmaxf(to[0], from[0]); });
    find_best(held, group, tops[0], row.sum != row.sum);
  }

  // Overwrites a row by its gradient, without the term that only the target's own element has.
  template <class Held> LIGER_DEVICE void replace(Held& held, const RowGradient<T>& gradient) const {
    const float scale = gradient.scale, soft = gradient.soft;
    const auto exponent_gradient = [&](float x) {
      const float share = x * (a.inverse_softcap * ln_2);
      return (scale * fast_exp2(x + gradient.exp.offset) - soft) * fmaf(-share, share, 1.f);
    };
    const auto logit_gradient = [&](float x) { return scale * gradient.exp(x) - soft; };
    if (soft != 0 && a.class_weight.data) {  // rare, and therefore not optimised
      held.read_again(
          [&](const auto& raw, int column, T* address) { store(address, gradient.template compute<true>(a, raw, column, -1)); });
    } else if (a.softcap != 0) {
      held.replace([&](auto raw, int) {
        float x[packed_elements<decltype(raw)>];
        widen(x, raw);
        capped_exponents<T>(a, x);
#pragma unroll
        for (int j = 0; j < packed_elements<decltype(raw)>; ++j) x[j] = exponent_gradient(x[j]);
        raw.set(x);
        return raw;
      });
    } else {
      held.replace([&](const auto& raw, int) { return map_elements(raw, logit_gradient); });
    }
  }

  // Finds the column of the first NaN or, if there is none, of the first logit that equals `largest`, the row's maximum. Most threads skip
  // the search: their own maximum is smaller.
  template <class Held, class Group> LIGER_DEVICE void find_best(const Held& held, Group& group, float largest, bool may_have_nan) {
    constexpr int behind_all = 1 << 30;
    int found = INT_MAX;
    if (may_have_nan || raw_max == largest)
      held.for_each([&](const auto& raw, int column) {
#pragma unroll
        for (int j = packed_elements<decltype(raw)> - 1; j >= 0; --j) {
          const float x = raw[j];
          const int at = x != x ? column + j : x == largest ? behind_all + column + j : INT_MAX;
          found = at < found ? at : found;
        }
      });
    float columns[2] = {bit_cast<float>(found), 0};
    group.reduce(columns,
                 [](float (&to)[2], const float (&from)[2]) { to[0] = bit_cast<int>(to[0]) < bit_cast<int>(from[0]) ? to[0] : from[0]; });
    best_column = bit_cast<int>(columns[0]) & (behind_all - 1);
  }

 private:
  LIGER_DEVICE static float finite(float v) { return fabsf(v) < __builtin_inff() ? v : 0.f; }
  // Sums are first relative to the largest exponent, and at the end relative to `row.max`, which differs from it only by rounding.
  template <class Held> LIGER_DEVICE void take_capped(Held& held, Exponentials& row) {
    raw_max = held.largest();
    const float top = raw_max == minus_infinity() ? 0.f : capped_exponent<T>(a, raw_max);
    held.for_each([&](const auto& raw, int) {
      float x[packed_elements<decltype(raw)>], part = 0, distance = 0;
      widen(x, raw);
      capped_exponents<T>(a, x);
#pragma unroll
      for (int j = 0; j < packed_elements<decltype(raw)>; ++j) {
        part += fast_exp2(x[j] - top);
        distance += x[j] - top;
      }
      row.sum += part;
      weighted += distance;
      weights += packed_elements<decltype(raw)>;
    });
    weighted *= ln_2;
    if (raw_max != minus_infinity()) row.max = top * ln_2;
    row.sum *= fast_exp2(fmaf(-row.base(), log2_e, top));
    anchor = row.base();
  }
};

}  // namespace liger::gpu
