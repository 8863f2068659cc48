// The fused loss's kernel for log-probabilities: it computes each row's results and overwrites the logits by their gradient.
//
// It holds rows as InPlaceHeld in cross_entropy_in_place.cu does, in one matrix or several. It is a kernel of its own because a row of
// log-probabilities also needs a factor of its logits (logit_scale / temperature), and sums for the entropy, the mean and log(sum(p^2)).
// Separate passes for the chunks' statistics, their merge (cross_entropy_chunks.cu) and the gradient would read a row once more, and are
// slower. The factor is part of the exponents' slope and costs nothing. The entropy costs one multiply-add and one maximum per element,
// since the exponents of 2 are already in registers:
//   entropy = log(S) - ln(2) * M / S  with  t = (x - max) * factor * log2(e),  S = sum(2^t),  M = sum(2^t * t).
// The kernel does not support softcap, label smoothing or another option of a loss (launch/arguments.h).
#include "gpu/held_arguments.h"

namespace liger::gpu {
namespace {

using Slots = CrossEntropyStatistics;

// The sums of a row, or of a thread's part of it, relative to the largest logit `max`, which is not multiplied by the row's factor.
template <class T> struct TokenSums {
  float factor, max, sum = 0, moment = 0, squares = 0;  // sums of e = 2^t, of e * t, and of e * e

  LIGER_DEVICE float base() const { return max == minus_infinity() ? 0.f : max; }
  LIGER_DEVICE Exp<T> exponential() const { return Exp<T>(base(), 0, factor); }

  template <class Held> LIGER_DEVICE TokenSums(Held& held, float factor, bool moments, bool squared) : factor(factor), max(held.largest()) {
    const Exp<T> exp = exponential();
    const auto add = [&]<int Terms>() {
      float totals[Terms] = {};
      held.add(totals, [&](float x, float (&parts)[Terms]) {
        const float t = exp.exponent(x), e = fast_exp2(t);
        parts[0] += e;
        if constexpr (Terms > 1) parts[1] += e * fmaxf(t, -1000.f);  // the bound makes the term of -inf 0; NaN stays in e
        if constexpr (Terms > 2) parts[2] += e * e;
      });
      sum = totals[0];
      if constexpr (Terms > 1) moment = totals[1];
      if constexpr (Terms > 2) squares = totals[2];
    };
    if (!moments) add.template operator()<1>();
    else if (!squared) add.template operator()<2>();
    else add.template operator()<3>();
    // Every t has an offset: the exponent of the base, which rounding leaves near 0 instead of at 0.
    const float off = exp.exponent(base()), correction = fast_exp2(-off);
    moment = correction * (moment - off * sum);
    sum *= correction;
    squares *= correction * correction;
  }

  // Merges the sums of all threads of the row.
  template <class Group> LIGER_DEVICE void merge(Group& group, bool moments) {
    const float slope = factor * log2_e, thread_max = max, thread_sum = sum;
    float pair[2] = {max, sum};
    group.reduce(pair, [&](float (&to)[2], const float (&from)[2]) {
      const float smaller = fast_exp2(to[0] == from[0] ? 0.f : -fabsf(to[0] - from[0]) * slope);
      to[1] = to[0] >= from[0] ? to[1] + from[1] * smaller : to[1] * smaller + from[1];
      to[0] = fmaxf(to[0], from[0]);
    });
    max = pair[0], sum = pair[1];
    if (!moments) return;
    const float distance = thread_max == max ? 0.f : (thread_max - max) * slope, smaller = fast_exp2(distance);
    float sums[2] = {thread_sum != 0 ? smaller * (moment + distance * thread_sum) : 0.f, squares * smaller * smaller};
    group.sum(sums);
    moment = sums[0], squares = sums[1];
  }
};

// The sums of a row over all classes: the held ones, and those that lie in none of its matrices. base: a transformed logit.
struct AllClasses {
  float base, sum, moment, squares, shift;  // moment: in natural units; shift: exp(base of the held sums - base)

  template <class T>
  LIGER_DEVICE explicit AllClasses(const TokenSums<T>& held)
      : base(held.base() * held.factor), sum(held.sum), moment(ln_2 * held.moment), squares(held.squares), shift(1) {}
  // Adds the other classes; statistic(slot): their statistics.
  template <class F> LIGER_DEVICE void join(float held_max, bool moments, F statistic) {
    const float others_max = statistic(Slots::maximum);
    const float top = fmaxf(held_max == minus_infinity() ? held_max : base, others_max);
    const float to = top == minus_infinity() ? 0.f : top;
    const auto distance = [&](float max) { return max == minus_infinity() ? 0.f : max - to; };
    const float held_distance = distance(held_max == minus_infinity() ? held_max : base), other = distance(others_max),
                scale = exp_as<bf16>(other);
    shift = exp_as<bf16>(held_distance);
    const float others_sum = scale * statistic(Slots::sum), held_sum = shift * sum;
    if (moments) {
      moment = shift * moment + held_distance * held_sum;
      if (others_sum != 0) moment += scale * statistic(Slots::moment) + other * others_sum;
      squares = shift * shift * squares + scale * scale * statistic(Slots::squares);
    }
    sum = held_sum + others_sum;
    base = to;
  }
};

template <class T, int N, int K> struct InPlaceLogProbs {
  using Args = HeldChunksArgs;
  static constexpr int max_threads = launch::in_place_log_probs.instance(N, K).max_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    BasicRowGroup<0, true> group(a.threads_per_row);
    const bool first = group.index == 0;
    const int at = int(group.first_row()), cols = args.columns();
    const auto logits = args.template logits<T>(at);
    HeldLogits<T, N, K, decltype(logits)> held(logits, group, should_load(args, at) ? cols : 0, args.shared_offset);
    const LogitRow<T, true, true> row(a, at, first, false);
    if (row.valid) held.load_single(group, cols);
    // Only the thread that owns the target's column loads and overwrites the target's logit by itself; it also writes the results.
    const bool has_target = row.valid && held.owns(row.target, cols / N * N, group);
    Packed<T, 1> raw_target{};
    if (has_target) load(raw_target, logits.from(row.target)(0));
    const float factor = a.logit_scale * row.over_temperature(a);
    const RowOutputs& out = args.out;

    TokenSums<T> sums(held, factor, a.moments, out.log_sum_sq != nullptr);
    HeldOptions<T> options{a, sums.max};
    sums.merge(group, a.moments);
    if (out.want_best()) options.find_best(held, group, sums.max, sums.sum != sums.sum);
    float total[2] = {};
    if (out.mean) {
      held.for_each([&](const auto& raw, int) {
        float part = 0;
#pragma unroll
        for (int j = 0; j < packed_elements<decltype(raw)>; ++j) part += raw[j];
        total[0] += part;
      });
      group.sum(total);
      total[0] *= factor;
    }

    AllClasses all(sums);
    float below_base = (to_float(raw_target[0]) - sums.base()) * factor;  // the target's logit minus the base of `all`
    bool writes = row.valid ? has_target : first && row.live;
    if (args.others && row.valid) {
      const auto statistic = [&](Slots::Slot slot) { return args.others[slot * a.rows + at]; };
      const float before = all.base;
      all.join(sums.max, a.moments, statistic);
      below_base += before - all.base;
      if (out.mean) total[0] += statistic(Slots::total);
      if (row.target >= cols) {
        below_base = statistic(Slots::target) - all.base;
        writes = first;
      }
    }
    const float log_sum = logf(all.sum), negative_log = log_sum - below_base;
    if (writes) {
      write_losses(a, out, row, 0.f, options.best_column, {all.base + log_sum, 0}, negative_log);
      if (a.moments) out.write_moments(row, log_sum - all.moment / all.sum, total[0] / float(a.vocab), logf(all.squares) - 2 * log_sum);
    }
    if (!row.live) return;
    if (!row.valid) return held.fill(row.ignored ? 0.f : not_a_number(), group, cols);

    const Exp<T> exp = sums.exponential();
    const float exp_scale = args.gradient_scale * all.shift * exp.correction(sums.base()) / all.sum;
    replace_by_probabilities(held, exp, exp_scale, factor * log2_e);
    if (has_target) {
      float gradient[1] = {exp_scale * exp(raw_target[0]) - args.gradient_scale};
      Packed<T, 1> one;
      one.set(gradient);
      store(logits.from(row.target)(0), one);
    }
  }
};

}  // namespace

void log_probs_in_place(const CrossEntropyInChunks& op, const launch::Launch& config, Stream stream) {
  HeldChunksArgs args = held_chunks_args(op, config, stream);
  args.rows.moments = op.row.moments();
  dispatch(op.row.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (sizeof(T) == 2)
      with_instance<launch::in_place_log_probs, fits<T>>(
          config, [&]<Instance I>() { launch<InPlaceLogProbs<T, I.vec, I.k>>(config, args, stream); });
  });
}

}  // namespace liger::gpu
