// Functions that cross_entropy.cpp and cross_entropy_chunks.cpp share: the sums over a row of logits, the formulas of loss and gradient,
// and the stores of a row's results.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/simd.h"
#include "kernels/cross_entropy.h"
#include "math/softcap.h"

namespace liger::cpu::LIGER_ISA {
namespace {

constexpr int64_t block_columns = 2048, first_guess_columns = 256;
constexpr double slack = 8;

template <class F> LIGER_INLINE void with_flag(bool flag, F&& f) {
  if (flag) f(std::true_type{});
  else f(std::false_type{});
}

// Computes x' from x. chain() multiplies a gradient by the derivative of softcap. scaled: x' = softcap(scale * x) * over_temperature.
template <class Acc, bool capped, bool scaled = false> struct Softcap {
  Acc cap, scale = 1, over_temperature = 1;
  LIGER_INLINE vec<Acc> operator()(vec<Acc> x) const {
    if constexpr (scaled) x *= capped ? scale : scale * over_temperature;
    if constexpr (capped) x = math::softcap<Math<Acc>>(x, cap);
    if constexpr (capped && scaled) x *= over_temperature;
    if constexpr (capped || scaled) x = rounded(x);  // so that x' - shift is exactly 0 for the element whose x' is the shift
    return x;
  }
  LIGER_INLINE Acc operator()(Acc x) const { return (*this)(splat<Acc>(x))[0]; }
  LIGER_INLINE vec<Acc> chain(vec<Acc> x_capped, vec<Acc> gradient) const {
    if constexpr (capped) return gradient * math::softcap_slope(x_capped, scaled ? cap * over_temperature : cap);
    else return gradient;
  }
};

// Calls f(row_softcap), where row_softcap(i) is the Softcap of row i. Loss: CrossEntropyRows or CrossEntropyBackward.
template <class Acc, class Loss, class F> LIGER_INLINE void with_softcap(const Loss& args, F&& f) {
  const Acc cap = Acc(args.options.softcap), scale = Acc(args.options.logit_scale);
  const Acc* const temperature = static_cast<const Acc*>(args.temperature);
  with_flag(cap != 0, [&](auto capped) {
    with_flag(temperature != nullptr || scale != 1, [&](auto scaled) {
      f([&](int64_t i) { return Softcap<Acc, capped, scaled>{cap, scale, temperature != nullptr ? 1 / temperature[i] : Acc(1)}; });
    });
  });
}

template <class Acc, class T> LIGER_INLINE Acc element(const In<T>& x, int64_t j) { return load<Acc>(x, j, Part{1})[0]; }

// log(sum(exp(x'))) as two numbers: `high`, rounded to Acc, and the remainder `low`. With large logits, `low` may hold the whole logarithm
// of the sum of exp(x' - shift).
struct LogSumExp {
  double high, low;
  double value() const { return high + low; }
  double minus(double x) const { return (high - x) + low; }
};

template <class Acc> struct RowSums {
  Acc max = -std::numeric_limits<Acc>::infinity();  // of x, not of x': the prediction is exact where softcap saturates
  int64_t max_block = 0;                        // the first block that holds max
  Acc shift = std::numeric_limits<Acc>::lowest();
  double exponentials = 0;  // sum of exp(x' - shift)
  double weighted = 0;      // sum of w * (x' - anchor), for label smoothing
  double moment = 0, squares = 0, total = 0;  // sums of exp(x' - shift) * (x' - shift), exp(2 * (x' - shift)), x'

  LogSumExp lse() const {
    const double log_sum = __builtin_log(exponentials), high = Acc(shift + log_sum);
    return {high, (shift - high) + log_sum};
  }
};

// Computes the sums of a row. terms: 1, 2 with label smoothing, or 4 with moments. A sum of logits may overflow, so label smoothing sums
// their differences from one logit, the anchor. `max` may miss a NaN; the sum of exponentials never does. Not inlined, so that kernels
// share its code: one call for each row.
template <class Acc, int terms, class T, class Cap, class W>
[[gnu::noinline, gnu::flatten]] RowSums<Acc> sum_row(const In<T>& row, int64_t vocab, const Cap& softcap, const In<W>& weight, Acc anchor) {
  constexpr Acc least = -std::numeric_limits<Acc>::infinity();
  RowSums<Acc> r;
  const Acc guess = max_columns<Acc>(std::min(vocab, first_guess_columns), [&](int64_t j, auto n) { return load<Acc>(row, j, n); });
  r.shift = std::max(r.shift, softcap(guess));
  for (int64_t first = 0; first < vocab; first += block_columns) {
    const int64_t count = std::min(block_columns, vocab - first);
    for (;;) {
      vec<Acc> top = splat<Acc>(least);
      const vec<Acc> shift = splat<Acc>(r.shift);
      const auto sums = sum_columns<Acc, terms>(count, [&](int64_t j, auto n, vec<Acc>(&term)[terms]) {
        const vec<Acc> x = load<Acc>(row, first + j, n), x_capped = softcap(x);
        top = Max{}(top, masked<Acc>(n, x, least));
        term[0] = Math<Acc>::exp(x_capped - shift);
        if constexpr (terms == 2) term[1] = (x_capped - anchor) * load<Acc>(weight, first + j, n);
        if constexpr (terms == 4) {
          const vec<Acc> distance = x_capped - shift;
          term[1] = term[0] * (distance < std::numeric_limits<Acc>::lowest() ? vec<Acc>{} : distance);  // 0 * -inf is NaN
          term[2] = term[0] * term[0];
          term[3] = x_capped;
        }
      });
      const Acc block_max = fold<Acc, lanes<Acc>>(top, Max{}), rise_to = softcap(block_max);
      if (rise_to > r.shift + Acc(slack)) {
        const double rise = double(rise_to) - double(r.shift), factor = __builtin_exp(-rise);
        if (r.exponentials != 0) r.moment = factor * (r.moment - rise * r.exponentials);
        r.squares *= factor * factor;
        r.exponentials *= factor;
        r.shift = rise_to;
        continue;
      }
      r.exponentials += sums[0];
      if constexpr (terms == 2) r.weighted += sums[1];
      if constexpr (terms == 4) r.moment += sums[1], r.squares += sums[2], r.total += sums[3];
      if (block_max > r.max) r.max = block_max, r.max_block = first;
      break;
    }
  }
  return r;
}

// Selects the terms: with moments, with label smoothing, or with neither.
template <class Acc, class T, class Cap, class W>
LIGER_INLINE RowSums<Acc> sum_row(const CrossEntropyOptions& options, const In<T>& row, int64_t vocab, const Cap& softcap,
                                  const In<W>& weight, Acc anchor, bool moments = false) {
  if (moments) return sum_row<Acc, 4>(row, vocab, softcap, In<constant>{1}, anchor);
  if (options.label_smoothing != 0) return sum_row<Acc, 2>(row, vocab, softcap, weight, anchor);
  return sum_row<Acc, 1>(row, vocab, softcap, In<constant>{1}, anchor);
}

// Returns the class that torch.argmax returns: the first of equal values; NaN is the greatest value.
template <class Acc, class T> int64_t argmax(const In<T>& row, int64_t vocab, const RowSums<Acc>& r) {
  if (r.exponentials != r.exponentials)
    for (int64_t j = 0; j < vocab; ++j)
      if (const Acc x = element<Acc>(row, j); x != x) return j;
  for (int64_t j = r.max_block; j < vocab; ++j)
    if (element<Acc>(row, j) == r.max) return j;
  return 0;
}

// The coefficients of a row's gradient: dx'[j] = p[j] * (probability + entropy * log(p[j])) - weight * w[j] - (j == y ? target : 0)
struct Slopes {
  double probability, weight, target, entropy = 0;
};

// The upstream gradients of a row's two losses.
struct LossFactors {
  double ce, z;

  // The factors of a gradient without reduction, relative to counts[scale], which is ce_scale unless class weights make that 0.
  template <class Acc> static LossFactors unreduced(const Acc* counts, double gradient_scale) {
    const double ce_scale = counts[CrossEntropyCounts::ce_scale], z_scale = counts[CrossEntropyCounts::z_scale];
    return {ce_scale != 0 ? gradient_scale : 0.0, gradient_scale * (ce_scale != 0 ? z_scale / ce_scale : 1.0)};
  }
};

// The formulas of kernels/cross_entropy.h for one row. Args: CrossEntropyRows or CrossEntropyBackward. y: the target's index in
// class_weight.
template <class Acc> struct Formula {
  template <class Args>
  Formula(const Args& a, int64_t classes)
      : options(a.options),
        weight(static_cast<const Acc*>(a.class_weight.data)),
        counts(static_cast<const Acc*>(a.counts)),
        smooth(a.options.label_smoothing / double(classes)) {}

  double hit(int64_t y) const { return (1 - options.label_smoothing) * (weight != nullptr ? double(weight[y]) : 1.0); }
  double weight_sum() const { return counts[CrossEntropyCounts::weight]; }
  double token_scale(const LogSumExp& lse, double x_target) const {
    return options.token_scaling ? __builtin_exp(-lse.minus(x_target)) : 1.0;
  }

  // The anchor of label smoothing (sum_row): the target's logit, or 0 if that is not finite.
  static double anchor(double x_target) { return __builtin_isfinite(x_target) ? x_target : 0.0; }
  double ce(int64_t y, const LogSumExp& lse, double x_target, double weighted) const {
    const double spread = smooth != 0 ? smooth * (weight_sum() * lse.minus(anchor(x_target)) - weighted) : 0.0;
    return token_scale(lse, x_target) * (hit(y) * lse.minus(x_target) + spread);
  }
  double z(const LogSumExp& lse, double x_target) const {
    return options.lse_square_scale != 0 ? token_scale(lse, x_target) * options.lse_square_scale * lse.value() * lse.value() : 0.0;
  }
  // token: the row's token_scale. upstream: the upstream gradients of its two losses.
  Slopes slopes(int64_t y, const LogSumExp& lse, double token, const LossFactors& upstream) const {
    const double ce = upstream.ce * token;
    const double z = options.lse_square_scale != 0 ? upstream.z * token * 2 * options.lse_square_scale * lse.value() : 0.0;
    return {ce * (hit(y) + smooth * weight_sum()) + z, ce * smooth, ce * hit(y)};
  }

  const CrossEntropyOptions& options;
  const Acc* weight;
  const Acc* counts;
  double smooth;
};

// Calls f with the class weights over which label smoothing spreads the target; all are 1 if there are none.
template <class Acc, class F> LIGER_INLINE void with_class_weight(const Vector& v, const CrossEntropyOptions& options, F&& f) {
  if (v.data == nullptr || options.label_smoothing == 0) f(In<constant>{1});
  else f(param<Acc>(v));
}

// Stores the results of a row in the arrays of `a` that are not null.
template <class Acc> struct RowResults {
  const CrossEntropyRows& a;

  // The results of a row whose target is ignored.
  void ignored(int64_t i) const {
    for (void* array : {a.ce, a.z, a.lse, a.entropy, a.mean, a.log_sum_sq}) put(array, i, 0);
    put(a.lse, a.rows + i, 0);
    if (a.accuracy != nullptr) static_cast<float*>(a.accuracy)[i] = 0;
    if (a.predicted != nullptr) a.predicted[i] = -1;
  }
  void losses(int64_t i, const Formula<Acc>& formula, const LogSumExp& lse, double x_target, double weighted) const {
    put(a.ce, i, formula.ce(a.target[i], lse, x_target, weighted));
    put(a.z, i, formula.z(lse, x_target));
    put(a.lse, i, lse.high);
    put(a.lse, a.rows + i, lse.low);
  }
  bool want_prediction() const { return a.accuracy != nullptr || a.predicted != nullptr; }
  void moments(int64_t i, const RowSums<Acc>& sums) const {
    const double log_sum = __builtin_log(sums.exponentials);
    put(a.entropy, i, log_sum - sums.moment / sums.exponentials);
    put(a.mean, i, sums.total / double(a.vocab));
    put(a.log_sum_sq, i, __builtin_log(sums.squares) - 2 * log_sum);
  }
  void prediction(int64_t i, int64_t predicted) const {
    if (a.accuracy != nullptr) static_cast<float*>(a.accuracy)[i] = predicted == a.target[i] ? 1.0f : 0.0f;
    if (a.predicted != nullptr) a.predicted[i] = predicted;
  }

 private:
  static void put(void* array, int64_t i, double value) {
    if (array != nullptr) static_cast<Acc*>(array)[i] = Acc(value);
  }
};

}  // namespace
}  // namespace liger::cpu::LIGER_ISA
