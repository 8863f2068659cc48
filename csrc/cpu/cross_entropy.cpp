// Cross entropy of rows of logits, and its gradient, on the CPU. The loss reads a row once, and the gradient reads it once more.
//
// Memory bounds fp32 logits, the exponential bounds 16-bit logits. So each pass computes about one exponential per element, and no pass
// waits for the row's maximum. The loss processes a row in blocks that fit the L1 cache. One pass over a block adds up exp(x' - shift) and
// finds the block's maximum. The first shift is the maximum of the row's first elements. If a block's maximum exceeds the shift by more
// than `slack`, it becomes the new shift: the sum so far is rescaled, and the block is processed again. The slack is small, so x' - shift
// is as precise as x' minus the row's maximum. Sums are fp32 within a block and fp64 across blocks; the loss of a row follows from them in
// fp64.
//
// In place (the fused loss), a row's gradient is computed right after its loss, while the row is in the L2 cache.
//
// A NaN makes the row's sum NaN, and so its loss and gradient. Without softcap, so does +inf, and -inf is a class of probability 0.
// (Softcap makes both infinities finite.)
#include "cpu/cross_entropy_rows.h"

namespace liger::cpu::LIGER_ISA {
namespace {

template <class Acc, class T> LIGER_INLINE void write_zeros(const Out<T>& out, int64_t cols) {
  columns<Acc>(cols, [&](int64_t j, auto n) { store(out, j, n, vec<Acc>{}); });
}

// Writes the gradient of a row. `out` may be the memory of the logits. A target outside [0, vocab) belongs to another chunk. lse.low is
// part of the factor of the probabilities, since Acc cannot hold lse.high + lse.low. mixes: the gradient includes the entropy's. Not
// inlined, for the same reason as sum_row.
template <class Acc, bool mixes = false, class T, class Cap, class W>
[[gnu::noinline, gnu::flatten]] void write_gradient(const In<T>& row, const Out<T>& out, int64_t vocab, int64_t target, const Cap& softcap,
                                                    const LogSumExp& lse, const Slopes& slopes, const In<W>& weight) {
  const vec<Acc> probability = splat<Acc>(Acc(slopes.probability * __builtin_exp(-lse.low)));
  const vec<Acc> share = splat<Acc>(Acc(slopes.weight)), minus_lse = splat<Acc>(Acc(-lse.high));
  const vec<Acc> entropy = splat<Acc>(Acc(slopes.entropy * __builtin_exp(-lse.low)));
  const auto write = [&](int64_t j, auto n, vec<Acc> minus) {
    const vec<Acc> x = softcap(load<Acc>(row, j, n)), log_p = x + minus_lse, p = Math<Acc>::exp(log_p);
    vec<Acc> d = probability * p - share * load<Acc>(weight, j, n);
    if constexpr (mixes) d += p == Acc(0) ? vec<Acc>{} : entropy * p * log_p;
    store(out, j, n, softcap.chain(x, d - minus));
  };
  const auto without_target = [&](int64_t j, auto n) { write(j, n, vec<Acc>{}); };
  if (target < 0 || target >= vocab) return columns<Acc>(vocab, without_target);
  const int64_t at = target / lanes<Acc> * lanes<Acc>, after = std::min(vocab, at + lanes<Acc>);
  vec<Acc> minus{};
  minus[int(target - at)] = Acc(slopes.target);
  columns<Acc>(0, at, without_target);
  columns<Acc>(at, after, [&](int64_t j, auto n) { write(j, n, minus); });
  columns<Acc>(after, vocab, without_target);
}

// Replaces a stored gradient (CrossEntropyBackward::stored), which is scale * (p[j] - [j == target]), by the gradient that `mix` defines
// (kernels/cross_entropy.h). Computes the logarithms one element at a time.
template <class Acc, class T>
[[gnu::noinline, gnu::flatten]] void mix_stored(const In<T>& row, const Out<T>& out, int64_t vocab, int64_t target, const Acc* mix,
                                                Acc scale) {
  const Acc inverse = 1 / scale, p_target = Acc(__builtin_exp(mix[3]));
  const auto mixed = [&](Acc p, Acc log_p) { return p > 0 ? scale * p * (mix[0] + mix[1] * log_p) : Acc(0); };
  columns<Acc>(vocab, [&](int64_t j, auto n) {
    vec<Acc> p = load<Acc>(row, j, n) * inverse;
    for (int lane = 0; lane < lanes<Acc>; ++lane)
      p[lane] = j + lane == target ? mixed(p_target, mix[3]) - scale * mix[2] : mixed(p[lane], Acc(__builtin_log(p[lane])));
    store(out, j, n, p);
  });
}

// Stores the losses of each row in the arrays that are not null, then calls then(…) while the row is in the cache. For an ignored row it
// reads no logits and calls ignored(i) instead.
template <class Acc, class T, class Ignored, class Then>
LIGER_INLINE void for_each_row(const CrossEntropyRows& a, int64_t begin, int64_t end, Ignored&& ignored, Then&& then) {
  const Formula<Acc> formula(a, a.vocab);
  const RowResults<Acc> results{a};
  with_flag(a.options.softcap != 0, [&](auto capped) {
    const Softcap<Acc, capped> softcap{Acc(a.options.softcap)};
    with_class_weight<Acc>(a.class_weight, a.options, [&](const auto& weight) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t y = a.target[i];
        if (y == a.options.ignore_index) {
          results.ignored(i);
          ignored(i);
          continue;
        }
        const In<T> x = row<T>(a.logits, i);
        const double x_target = softcap(element<Acc>(x, y));
        const RowSums<Acc> sums = sum_row<Acc>(a.options, x, a.vocab, softcap, weight, Acc(formula.anchor(x_target)));
        const LogSumExp lse = sums.lse();
        results.losses(i, formula, lse, x_target, sums.weighted);
        if (results.want_prediction()) results.prediction(i, argmax(x, a.vocab, sums));
        then(i, x, softcap, lse, x_target, weight, formula);
      }
    });
  });
}

// The upstream gradient of row i: one number per row (stride 1), or one for all rows (stride 0).
double upstream_gradient(const Rows& grad, int64_t i) {
  return dispatch(grad.dtype, [&](auto t) { return double(element<double>(row<decltype(t)>(grad, i), 0)); });
}

}  // namespace

template <> [[gnu::flatten]] void run(const CrossEntropyRows& a, int64_t begin, int64_t end) {
  dispatch(a.logits.dtype, [&](auto t) {
    using T = decltype(t);
    for_each_row<accumulator_type<T>, T>(a, begin, end, [](int64_t) {}, [](auto&&...) {});
  });
}

template <> [[gnu::flatten]] void run(const CrossEntropyInPlace& a, int64_t begin, int64_t end) {
  dispatch(a.row.logits.dtype, [&](auto t) {
    using T = decltype(t);
    using Acc = accumulator_type<T>;
    const LossFactors factors = LossFactors::unreduced(static_cast<const Acc*>(a.row.counts), a.gradient_scale);
    const MutableRows gradient = a.gradient();
    for_each_row<Acc, T>(
        a.row, begin, end, [&](int64_t i) { write_zeros<Acc>(row<T>(gradient, i), a.row.vocab); },
        [&](int64_t i, const In<T>& x, const auto& softcap, const LogSumExp& lse, double x_target, const auto& weight,
            const Formula<Acc>& formula) {
          const Slopes slopes = formula.slopes(a.row.target[i], lse, formula.token_scale(lse, x_target), factors);
          write_gradient<Acc>(x, row<T>(gradient, i), a.row.vocab, a.row.target[i], softcap, lse, slopes, weight);
        });
  });
}

template <> [[gnu::flatten]] void run(const CrossEntropyBackward& a, int64_t begin, int64_t end) {
  dispatch(a.logits.dtype, [&](auto t) {
    using T = decltype(t);
    using Acc = accumulator_type<T>;
    const Formula<Acc> formula(a, a.classes.all);
    const bool stream = a.dlogits.data != a.logits.data && streams(a.dlogits, a.rows, a.vocab);
    const auto row_factors = [&](int64_t i) {
      if (a.grad.data == nullptr) return LossFactors::unreduced(formula.counts, a.gradient_scale);
      const double grad = upstream_gradient(a.grad, i);
      return LossFactors{grad * formula.counts[CrossEntropyCounts::ce_scale], grad * formula.counts[CrossEntropyCounts::z_scale]};
    };
    with_softcap<Acc>(a, [&](auto row_softcap) {
      with_class_weight<Acc>(a.class_weight, a.options, [&](const auto& weight) {
        for (int64_t i = begin; i < end; ++i) {
          const Out<T> out = row<T>(a.dlogits, i, stream);
          if (a.target[i] == a.options.ignore_index) {
            write_zeros<Acc>(out, a.vocab);
            continue;
          }
          const In<T> x = row<T>(a.logits, i);
          if (a.stored) {
            mix_stored<Acc>(x, out, a.vocab, a.target[i] - a.classes.first, static_cast<const Acc*>(a.mix) + 4 * i, Acc(a.gradient_scale));
            continue;
          }
          const Acc* const saved = static_cast<const Acc*>(a.lse);
          const LogSumExp lse{saved[i], saved[a.rows + i]};
          const double token = a.options.token_scaling ? static_cast<const Acc*>(a.token)[i] : 1.0;
          const int64_t target = a.target[i] - a.classes.first;
          if (a.mix != nullptr) {
            const Acc* const mix = static_cast<const Acc*>(a.mix) + 4 * i;
            const Slopes slopes{mix[0] * a.gradient_scale, 0, mix[2] * a.gradient_scale, mix[1] * a.gradient_scale};
            write_gradient<Acc, true>(x, out, a.vocab, target, row_softcap(i), lse, slopes, In<constant>{1});
          } else {
            write_gradient<Acc>(x, out, a.vocab, target, row_softcap(i), lse, formula.slopes(target, lse, token, row_factors(i)), weight);
          }
        }
      });
    });
    if (stream) stream_fence();
  });
}

}  // namespace liger::cpu::LIGER_ISA
