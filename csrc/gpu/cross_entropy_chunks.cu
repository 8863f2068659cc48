// Cross entropy of a vocabulary that is split into chunks (ranges of classes), in one process or sharded over several: the statistics of
// each row in one chunk (Statistics), and their merge into each row's losses and log-sum-exp (Merge).
//
// Memory bandwidth bounds Statistics: a thread group reads its row of the chunk once, as in cross_entropy.cu. Latency bounds Merge: one
// thread per row reads a few numbers per chunk. Backward in cross_entropy.cu computes the gradient of a chunk.
#include "gpu/cross_entropy_launch.h"

namespace liger::gpu {
namespace {

using Slots = CrossEntropyStatistics;

template <class T, int N, bool Full, bool LogProbs> struct Statistics {
  struct Args {
    LogitRows rows;
    Classes classes;
    float* statistics;
    int64_t* best_class;
  };
  static constexpr int max_threads = launch::statistics_kernel.instance(N).max_threads, min_blocks = 2;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    RowGroup group(a.threads_per_row);
    const LogitRow<T, Full, LogProbs> row(a, args.classes, group.first_row(), group.index == 0, true);
    const RowWalk<T, N> columns(row.valid ? a.vocab : 0, group, row.valid ? unaligned_head<N>(row.data, a.vocab) : 0);
    const bool want_best = Full && args.best_class != nullptr, weighted = Full && a.class_share != 0 && a.class_weight.data != nullptr;

    RowStatistics<T, Full, LogProbs> statistics(row.anchor(a), row.over_temperature(a));
    float weights[2] = {};
    const auto add = [&](auto& x, int column) {
      statistics.add(a, x, column, want_best);
      if (weighted) {
        std::remove_reference_t<decltype(x)> w;
        statistics.class_weights(a, w, column);
        for (const float one : w) weights[0] += one;
      }
    };
    columns.template walk<launch::logits_in_flight(Full)>([&](auto& raw, int, int column) { load<Hint::stream>(raw, row.data + column); },
                                                          [&](const auto& raw, int, int column) {
                                                            float x[N];
                                                            widen(x, raw);
                                                            add(x, column);
                                                          });
    if (columns.single >= 0) {
      float x[1] = {to_float(row.data[columns.single])};
      add(x, columns.single);
    }
    statistics.merge(group);
    if constexpr (Full) {
      group.sum(weights);
      if constexpr (LogProbs) statistics.merge_moments(group);
    }
    if (group.index != 0 || !row.live) return;
    const auto put = [&](Slots::Slot slot, float value) { args.statistics[slot * a.rows + row.row] = value; };
    put(Slots::maximum, statistics.max);
    put(Slots::sum, statistics.sum);
    put(Slots::target, row.valid && row.here(a) ? row.target_logit(a) : 0.f);
    put(Slots::weighted, statistics.weighted);
    put(Slots::anchor, statistics.anchor);
    put(Slots::weights, weighted ? weights[0] : float(a.vocab));
    put(Slots::best, statistics.best);
    if (LogProbs && a.moments) {
      put(Slots::moment, statistics.moment);
      put(Slots::squares, statistics.squares);
      put(Slots::total, statistics.total);
    }
    if (args.best_class) args.best_class[row.row] = args.classes.first + statistics.best_column;
  }
};

struct Merge {
  struct Args {
    LogitRows rows;
    RowOutputs out;
    int64_t chunks;
    const float* statistics;
    const int64_t* best_class;
    float* token;
  };
  static constexpr int max_threads = launch::merge_kernel.instance().max_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    const LogitRow<float, true> row(a, block_id() * block_threads() + thread_id(), true, false);
    if (!row.live) return;
    const int64_t slots = Slots::slot_count(a.moments);
    const auto statistic = [&](int64_t chunk, Slots::Slot slot) { return args.statistics[(chunk * slots + slot) * a.rows + row.row]; };
    float max = minus_infinity(), target = 0, best = minus_infinity();
    int64_t best_class = INT_MAX;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      max = fmaxf(max, statistic(chunk, Slots::maximum));
      target += statistic(chunk, Slots::target);
      if (!args.best_class) continue;
      const float other = statistic(chunk, Slots::best);  // NaN is the largest; of equal ones the first class wins
      const int64_t at = args.best_class[chunk * a.rows + row.row];
      const bool larger = other > best || (other != other && best == best), equal = other == best || (other != other && best != best);
      if (larger || (equal && at < best_class)) best = other, best_class = at;
    }
    const Exponentials largest{max};
    const float anchor = a.class_share != 0 && fabsf(target) < __builtin_inff() ? target : 0.f;
    double sum = 0, weighted = 0, moment = 0, squares = 0, total = 0;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      const float distance = statistic(chunk, Slots::maximum) - largest.base();
      const double factor = double(expf(distance)), part = double(statistic(chunk, Slots::sum)) * factor;
      sum += part;
      weighted +=
          statistic(chunk, Slots::weighted) + double(statistic(chunk, Slots::anchor) - anchor) * double(statistic(chunk, Slots::weights));
      if (!a.moments) continue;
      if (part != 0) moment += factor * double(statistic(chunk, Slots::moment)) + double(distance) * part;
      squares += factor * factor * double(statistic(chunk, Slots::squares));
      total += double(statistic(chunk, Slots::total));
    }
    const Exponentials merged{max, float(sum)};
    const float log_sum = merged.log_sum(), negative_log = merged.base() - target + log_sum;
    write_losses(a, args.out, row, float(weighted), best_class, LogSumExp::compute<float>(merged, log_sum), negative_log);
    if (args.token) args.token[row.row] = row_token<float>(a, negative_log);
    if (a.moments)
      args.out.write_moments(row, log_sum - float(moment / sum), float(total / double(a.vocab)), logf(float(squares)) - 2 * log_sum);
  }
};

}  // namespace

void cross_entropy_statistics(const CrossEntropyStatistics& op, Stream stream) {
  const CrossEntropyRows& row = op.row;
  if (row.rows == 0) return;
  const bool full = launch::is_full(op);
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  with_logits<launch::statistics_kernel>(config, row.logits.dtype, full, [&]<class T, bool Full, Instance I>() {
    LogitRows rows = logit_rows(row, op.classes.all, config.plan, stream);
    rows.moments = op.moments;
    const auto launch_it = [&]<bool LogProbs>() {
      launch<Statistics<T, I.vec, Full || LogProbs, LogProbs>>(
          config, {rows, op.classes, static_cast<float*>(op.statistics), op.best_class}, stream);
    };
    if (Full && launch::needs_log_probs(op)) launch_it.template operator()<true>();
    else launch_it.template operator()<false>();
  });
}

void cross_entropy_merge(const CrossEntropyMerge& op, Stream stream) {
  if (op.row.rows == 0) return;
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  LogitRows rows = logit_rows(op.row, op.row.vocab, config.plan, stream);
  rows.moments = op.row.moments();
  launch<Merge>(
      config,
      {rows, row_outputs(op.row), op.chunks, static_cast<const float*>(op.statistics), op.best_class, static_cast<float*>(op.token)},
      stream);
}

}  // namespace liger::gpu
