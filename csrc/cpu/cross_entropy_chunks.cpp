// Cross entropy of a vocabulary in chunks (ranges of classes), on the CPU: the statistics of each row in one chunk, and the merge of all
// chunks' statistics into losses. The limits of the statistics are the limits of the loss in cross_entropy.cpp: memory for fp32 logits, the
// exponential for 16-bit logits. The merge reads a few numbers per row and chunk. cross_entropy.cpp computes the gradient.
#include "cpu/cross_entropy_rows.h"

namespace liger::cpu::LIGER_ISA {

template <> [[gnu::flatten]] void run(const CrossEntropyStatistics& a, int64_t begin, int64_t end) {
  const CrossEntropyRows& args = a.row;
  dispatch(args.logits.dtype, [&](auto t) {
    using T = decltype(t);
    using Acc = accumulator_type<T>;
    using Slots = CrossEntropyStatistics;
    double weights = double(args.vocab);
    if (args.options.label_smoothing != 0 && args.class_weight.data != nullptr) {
      const auto weight = param<Acc>(args.class_weight);
      weights = sum_columns<Acc>(args.vocab, [&](int64_t j, auto n) { return load<Acc>(weight, j, n); });
    }
    with_softcap<Acc>(args, [&](auto row_softcap) {
      with_class_weight<Acc>(args.class_weight, args.options, [&](const auto& weight) {
        for (int64_t i = begin; i < end; ++i) {
          const auto put = [&](Slots::Slot slot, double value) { static_cast<Acc*>(a.statistics)[slot * args.rows + i] = Acc(value); };
          if (args.target[i] == args.options.ignore_index) {  // the merge skips this row
            for (int slot = 0; slot < Slots::slot_count(a.moments); ++slot) put(Slots::Slot(slot), 0);
            if (a.best_class != nullptr) a.best_class[i] = 0;
            continue;
          }
          const In<T> x = row<T>(args.logits, i);
          const auto softcap = row_softcap(i);
          const int64_t target = args.target[i] - a.classes.first;
          const bool here = target >= 0 && target < args.vocab;
          const double near = softcap(element<Acc>(x, here ? target : 0));
          const Acc anchor = Acc(Formula<Acc>::anchor(near));
          const RowSums<Acc> sums = sum_row<Acc>(args.options, x, args.vocab, softcap, weight, anchor, a.moments);
          put(Slots::maximum, sums.shift);
          put(Slots::sum, sums.exponentials);
          put(Slots::target, here ? near : 0.0);
          put(Slots::weighted, sums.weighted);
          put(Slots::anchor, anchor);
          put(Slots::weights, weights);
          if (a.moments) {
            put(Slots::moment, sums.moment);
            put(Slots::squares, sums.squares);
            put(Slots::total, sums.total);
          }
          const int64_t best = a.best_class != nullptr ? argmax(x, args.vocab, sums) : 0;
          put(Slots::best, element<Acc>(x, best));
          if (a.best_class != nullptr) a.best_class[i] = a.classes.first + best;
        }
      });
    });
  });
}

template <> void run(const CrossEntropyMerge& a, int64_t begin, int64_t end) {
  dispatch_same({a.accumulator}, [&](auto, auto acc) {
    using Acc = decltype(acc);
    using Slots = CrossEntropyStatistics;
    const Formula<Acc> formula(a.row, a.row.vocab);
    const RowResults<Acc> results{a.row};
    const int64_t slots = Slots::slot_count(a.row.moments());
    for (int64_t i = begin; i < end; ++i) {
      if (a.row.target[i] == a.row.options.ignore_index) {
        results.ignored(i);
        if (a.token != nullptr) static_cast<Acc*>(a.token)[i] = 1;
        continue;
      }
      const auto statistic = [&](int64_t chunk, Slots::Slot slot) {
        return static_cast<const Acc*>(a.statistics)[(chunk * slots + slot) * a.row.rows + i];
      };
      RowSums<Acc> merged;
      double target = 0;
      for (int64_t chunk = 0; chunk < a.chunks; ++chunk) {
        merged.shift = std::max(merged.shift, statistic(chunk, Slots::maximum));
        target += statistic(chunk, Slots::target);
      }
      const double anchor = Formula<Acc>::anchor(target);
      for (int64_t chunk = 0; chunk < a.chunks; ++chunk) {
        merged.weighted +=
            statistic(chunk, Slots::weighted) + (statistic(chunk, Slots::anchor) - anchor) * statistic(chunk, Slots::weights);
        const double distance = double(statistic(chunk, Slots::maximum)) - double(merged.shift), factor = __builtin_exp(distance);
        const double sum = statistic(chunk, Slots::sum) * factor;
        merged.exponentials += sum;
        if (!a.row.moments()) continue;
        if (sum != 0) merged.moment += factor * statistic(chunk, Slots::moment) + distance * sum;
        merged.squares += statistic(chunk, Slots::squares) * factor * factor;
        merged.total += statistic(chunk, Slots::total);
      }
      const LogSumExp lse = merged.lse();
      results.losses(i, formula, lse, target, merged.weighted);
      if (a.row.moments()) results.moments(i, merged);
      if (a.token != nullptr) static_cast<Acc*>(a.token)[i] = Acc(formula.token_scale(lse, target));
      if (!results.want_prediction()) continue;
      Acc best = statistic(0, Slots::best);  // NaN is the largest value; of equal values, the first class counts
      int64_t best_class = a.best_class[i];
      for (int64_t chunk = 1; chunk < a.chunks; ++chunk) {
        const Acc other = statistic(chunk, Slots::best);
        const int64_t at = a.best_class[chunk * a.row.rows + i];
        const bool larger = other > best || (other != other && best == best), equal = other == best || (other != other && best != best);
        if (larger || (equal && at < best_class)) best = other, best_class = at;
      }
      results.prediction(i, best_class);
    }
  });
}

}  // namespace liger::cpu::LIGER_ISA
