// Cross entropy of rows of logits: a row is read once for its loss, and once more for its gradient.
//
// The bound is memory for fp32 and the exponential for 16-bit logits, so each element's exponential is taken once per reading and
// nothing waits for the row's maximum. A row goes by in blocks that fit the L1 cache: a block adds up exp(x' - shift) and finds
// its own maximum in one pass, with a shift that is known before: the maximum of the row's first elements. Only where a block
// rises more than `slack` above the shift is the shift raised to that block's maximum, the sum so far rescaled and the block done
// again. The slack is small, so that x' - shift keeps the precision that a subtraction of the true maximum would have.
// Sums are fp32 within a block and fp64 across blocks; everything that happens once per row is fp64.
//
// In place (the fused loss), the gradient's pass follows its row's first pass at once: the row is in the L2 cache still.
//
// -inf logits are classes of probability 0. NaN and +inf make the row's sum NaN, and with it the loss and gradient.
#include "kernels/cross_entropy.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/simd.h"
#include "math/softcap.h"

namespace liger::cpu::LIGER_ISA {
namespace {

constexpr int64_t block_columns = 2048, first_guess_columns = 256;
constexpr double slack = 8;

template <class F> LIGER_INLINE void with_flag(bool flag, F&& f) {
  if (flag) f(std::true_type{});
  else f(std::false_type{});
}

// x' of x, and what the gradient multiplies by on the way back.
template <class A, bool capped> struct Softcap {
  A cap;
  LIGER_INLINE vec<A> operator()(vec<A> x) const {
    if constexpr (capped) return math::softcap<Math<A>>(x, cap);
    else return x;
  }
  LIGER_INLINE A operator()(A x) const { return (*this)(splat<A>(x))[0]; }
  LIGER_INLINE vec<A> chain(vec<A> x_capped, vec<A> gradient) const {
    if constexpr (capped) return gradient * math::softcap_slope(x_capped, cap);
    else return gradient;
  }
};

template <class A, class T> LIGER_INLINE A element(const In<T>& x, int64_t j) { return load<A>(x, j, Part{1})[0]; }

// log(sum(exp(x'))): in A's precision, and what is beyond it. Where the logits are large, all of the sum's logarithm may be.
struct LogSumExp {
  double high, low;
  double value() const { return high + low; }
  double minus(double x) const { return (high - x) + low; }
};

template <class A> struct RowSums {
  A max = -std::numeric_limits<A>::infinity();  // of x, not of x': the prediction is exact where softcap saturates
  int64_t max_block = 0;                        // the first block that holds max
  A shift = std::numeric_limits<A>::lowest();
  double exponentials = 0;  // of x' - shift
  double weighted = 0;      // sum of w * (x' - anchor), for label smoothing

  LogSumExp lse() const {
    const double log_sum = __builtin_log(exponentials), high = A(shift + log_sum);
    return {high, (shift - high) + log_sum};
  }
};

// terms: 1, or 2 with label smoothing, whose sum of logits alone may overflow: differences to one of them, the anchor, are summed. NaN
// may be lost to `max`, but not to the sum of exponentials.
template <class A, int terms, class T, class Cap, class W>
LIGER_INLINE RowSums<A> sum_row(const In<T>& row, int64_t vocab, const Cap& softcap, const In<W>& weight, A anchor) {
  constexpr A least = -std::numeric_limits<A>::infinity();
  RowSums<A> r;
  const A guess = max_columns<A>(std::min(vocab, first_guess_columns), [&](int64_t j, auto n) { return load<A>(row, j, n); });
  r.shift = std::max(r.shift, softcap(guess));
  for (int64_t first = 0; first < vocab; first += block_columns) {
    const int64_t count = std::min(block_columns, vocab - first);
    for (;;) {
      vec<A> top = splat<A>(least);
      const vec<A> shift = splat<A>(r.shift);
      const auto sums = sum_columns<A, terms>(count, [&](int64_t j, auto n, vec<A>(&term)[terms]) {
        const vec<A> x = load<A>(row, first + j, n), x_capped = softcap(x);
        top = Max{}(top, only<A>(n, x, least));
        term[0] = Math<A>::exp(x_capped - shift);
        if constexpr (terms == 2) term[1] = (x_capped - anchor) * load<A>(weight, first + j, n);
      });
      const A block_max = fold<A, lanes<A>>(top, Max{}), rise_to = softcap(block_max);
      if (rise_to > r.shift + A(slack)) {
        r.exponentials *= __builtin_exp(double(r.shift) - double(rise_to));
        r.shift = rise_to;
        continue;
      }
      r.exponentials += sums[0];
      if constexpr (terms == 2) r.weighted += sums[1];
      if (block_max > r.max) r.max = block_max, r.max_block = first;
      break;
    }
  }
  return r;
}

// As torch.argmax: the first of equal values, and NaN is the greatest.
template <class A, class T> int64_t argmax(const In<T>& row, int64_t vocab, const RowSums<A>& r) {
  if (r.exponentials != r.exponentials)
    for (int64_t j = 0; j < vocab; ++j)
      if (const A x = element<A>(row, j); x != x) return j;
  for (int64_t j = r.max_block; j < vocab; ++j)
    if (element<A>(row, j) == r.max) return j;
  return 0;
}

// dx'[j] = probability * p[j] - weight * w[j] - (j == y ? target : 0)
struct Slopes {
  double probability, weight, target;
};

// The header's formulas for one row. Args: CrossEntropyRows or CrossEntropyBackward.
template <class A> struct Formula {
  template <class Args>
  explicit Formula(const Args& a)
      : options(a.options),
        weight(static_cast<const A*>(a.class_weight.data)),
        counts(static_cast<const A*>(a.counts)),
        smooth(a.options.label_smoothing / double(a.vocab)) {}

  double hit(int64_t y) const { return (1 - options.label_smoothing) * (weight != nullptr ? double(weight[y]) : 1.0); }
  double weight_sum() const { return counts[CrossEntropyCounts::weight]; }
  double token_scale(const LogSumExp& lse, double x_target) const {
    return options.token_scaling ? __builtin_exp(-lse.minus(x_target)) : 1.0;
  }

  // What label smoothing sums logits relative to: the target's, if that is a number.
  static double anchor(double x_target) { return __builtin_isfinite(x_target) ? x_target : 0.0; }
  double ce(int64_t y, const LogSumExp& lse, double x_target, double weighted) const {
    const double spread = smooth != 0 ? smooth * (weight_sum() * lse.minus(anchor(x_target)) - weighted) : 0.0;
    return token_scale(lse, x_target) * (hit(y) * lse.minus(x_target) + spread);
  }
  double z(const LogSumExp& lse, double x_target) const {
    return options.lse_square_scale != 0 ? token_scale(lse, x_target) * options.lse_square_scale * lse.value() * lse.value() : 0.0;
  }
  Slopes slopes(int64_t y, const LogSumExp& lse, double x_target, double ce_factor, double z_factor) const {
    const double scale = token_scale(lse, x_target), ce = ce_factor * scale;
    const double z = options.lse_square_scale != 0 ? z_factor * scale * 2 * options.lse_square_scale * lse.value() : 0.0;
    return {ce * (hit(y) + smooth * weight_sum()) + z, ce * smooth, ce * hit(y)};
  }

  const CrossEntropyOptions& options;
  const A* weight;
  const A* counts;
  double smooth;
};

template <class A, class T> LIGER_INLINE void write_zeros(const Out<T>& out, int64_t cols) {
  columns<A>(cols, [&](int64_t j, auto n) { store(out, j, n, vec<A>{}); });
}

// out may be the logits' own memory. What lse has beyond A's precision is in the factor of the probabilities.
template <class A, class T, class Cap, class W>
LIGER_INLINE void write_gradient(const In<T>& row, const Out<T>& out, int64_t vocab, int64_t target, const Cap& softcap,
                                 const LogSumExp& lse, const Slopes& slopes, const In<W>& weight) {
  const vec<A> probability = splat<A>(A(slopes.probability * __builtin_exp(-lse.low)));
  const vec<A> share = splat<A>(A(slopes.weight)), minus_lse = splat<A>(A(-lse.high));
  const auto write = [&](int64_t j, auto n, vec<A> minus) {
    const vec<A> x = softcap(load<A>(row, j, n));
    const vec<A> d = probability * Math<A>::exp(x + minus_lse) - share * load<A>(weight, j, n);
    store(out, j, n, softcap.chain(x, d - minus));
  };
  const auto without_target = [&](int64_t j, auto n) { write(j, n, vec<A>{}); };
  const int64_t at = target / lanes<A> * lanes<A>, after = std::min(vocab, at + lanes<A>);
  vec<A> minus{};
  minus[int(target - at)] = A(slopes.target);
  columns<A>(0, at, without_target);
  columns<A>(at, after, [&](int64_t j, auto n) { write(j, n, minus); });
  columns<A>(after, vocab, without_target);
}

// The class weights that label smoothing spreads the target over: all ones, or as given.
template <class A, class F> LIGER_INLINE void with_class_weight(const Vector& v, const CrossEntropyOptions& options, F&& f) {
  if (v.data == nullptr || options.label_smoothing == 0) f(In<constant>{1});
  else f(param<A>(v));
}

// The loss of each row, into the arrays that are wanted; after it, while the row is in the cache, then(…), or ignored(i) for a row
// that does not count, whose logits are not read.
template <class A, class T, class Ignored, class Then>
LIGER_INLINE void for_each_row(const CrossEntropyRows& a, int64_t begin, int64_t end, Ignored&& ignored, Then&& then) {
  const Formula<A> formula(a);
  const auto put = [](void* array, int64_t i, double value) {
    if (array != nullptr) static_cast<A*>(array)[i] = A(value);
  };
  const auto put_prediction = [&](int64_t i, int64_t prediction) {
    if (a.accuracy != nullptr) static_cast<float*>(a.accuracy)[i] = prediction == a.target[i] ? 1.0f : 0.0f;
    if (a.predicted != nullptr) a.predicted[i] = prediction;
  };
  with_flag(a.options.softcap != 0, [&](auto capped) {
    const Softcap<A, capped> softcap{A(a.options.softcap)};
    with_class_weight<A>(a.class_weight, a.options, [&](const auto& weight) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t y = a.target[i];
        if (y == a.options.ignore_index) {
          for (void* array : {a.ce, a.z, a.lse}) put(array, i, 0);
          put(a.lse, a.rows + i, 0);
          if (a.accuracy != nullptr) static_cast<float*>(a.accuracy)[i] = 0;
          if (a.predicted != nullptr) a.predicted[i] = -1;
          ignored(i);
          continue;
        }
        const In<T> x = row<T>(a.logits, i);
        const double x_target = softcap(element<A>(x, y));
        RowSums<A> sums;
        const A anchor = A(formula.anchor(x_target));
        if (a.options.label_smoothing != 0) sums = sum_row<A, 2>(x, a.vocab, softcap, weight, anchor);
        else sums = sum_row<A, 1>(x, a.vocab, softcap, weight, anchor);
        const LogSumExp lse = sums.lse();
        put(a.ce, i, formula.ce(y, lse, x_target, sums.weighted));
        put(a.z, i, formula.z(lse, x_target));
        put(a.lse, i, lse.high);
        put(a.lse, a.rows + i, lse.low);
        if (a.accuracy != nullptr || a.predicted != nullptr) put_prediction(i, argmax(x, a.vocab, sums));
        then(i, x, softcap, lse, x_target, weight, formula);
      }
    });
  });
}

// One number per row (stride 1), or one for all (stride 0).
double grad_of(const Rows& grad, int64_t i) {
  return dispatch(grad.dtype, [&](auto t) { return double(element<double>(row<decltype(t)>(grad, i), 0)); });
}

}  // namespace

template <> [[gnu::flatten]] void run(const CrossEntropyRows& a, int64_t begin, int64_t end) {
  dispatch_same({a.logits.dtype}, [&](auto t, auto acc) {
    using A = decltype(acc);
    if constexpr (!std::is_same_v<decltype(t), any>) for_each_row<A, decltype(t)>(a, begin, end, [](int64_t) {}, [](auto&&...) {});
  });
}

template <> [[gnu::flatten]] void run(const CrossEntropyInPlace& a, int64_t begin, int64_t end) {
  dispatch_same({a.row.logits.dtype}, [&](auto t, auto acc) {
    using A = decltype(acc);
    using T = decltype(t);
    if constexpr (!std::is_same_v<T, any>) {
      const A* const counts = static_cast<const A*>(a.row.counts);
      // Relative to the scale of all gradients, which is that of ce unless class weights make it 0.
      const double ce_scale = counts[CrossEntropyCounts::ce_scale], z_scale = counts[CrossEntropyCounts::z_scale];
      const double ce_factor = ce_scale != 0 ? a.gradient_scale : 0.0;
      const double z_factor = a.gradient_scale * (ce_scale != 0 ? z_scale / ce_scale : 1.0);
      for_each_row<A, T>(
          a.row, begin, end, [&](int64_t i) { write_zeros<A>(row<T>(a.gradient, i), a.row.vocab); },
          [&](int64_t i, const In<T>& x, const auto& softcap, const LogSumExp& lse, double x_target, const auto& weight,
              const Formula<A>& formula) {
            const Slopes slopes = formula.slopes(a.row.target[i], lse, x_target, ce_factor, z_factor);
            write_gradient<A>(x, row<T>(a.gradient, i), a.row.vocab, a.row.target[i], softcap, lse, slopes, weight);
          });
    }
  });
}

template <> [[gnu::flatten]] void run(const CrossEntropyBackward& a, int64_t begin, int64_t end) {
  dispatch_same({a.logits.dtype}, [&](auto t, auto acc) {
    using A = decltype(acc);
    using T = decltype(t);
    if constexpr (!std::is_same_v<T, any>) {
      const Formula<A> formula(a);
      const bool stream = streams(a.dlogits, a.rows, a.vocab);
      with_flag(a.options.softcap != 0, [&](auto capped) {
        const Softcap<A, capped> softcap{A(a.options.softcap)};
        with_class_weight<A>(a.class_weight, a.options, [&](const auto& weight) {
          for (int64_t i = begin; i < end; ++i) {
            const Out<T> out = row<T>(a.dlogits, i, stream);
            if (a.target[i] == a.options.ignore_index) {
              write_zeros<A>(out, a.vocab);
              continue;
            }
            const In<T> x = row<T>(a.logits, i);
            const A* const saved = static_cast<const A*>(a.lse);
            const LogSumExp lse{saved[i], saved[a.rows + i]};
            const double grad = grad_of(a.grad, i), x_target = softcap(element<A>(x, a.target[i]));
            const double ce_factor = grad * formula.counts[CrossEntropyCounts::ce_scale];
            const double z_factor = grad * formula.counts[CrossEntropyCounts::z_scale];
            const Slopes slopes = formula.slopes(a.target[i], lse, x_target, ce_factor, z_factor);
            write_gradient<A>(x, out, a.vocab, a.target[i], softcap, lse, slopes, weight);
          }
        });
      });
      if (stream) stream_fence();
    }
  });
}

}  // namespace liger::cpu::LIGER_ISA
