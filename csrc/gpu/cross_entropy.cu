// Cross entropy of rows of logits: the losses of each row (Forward), and the gradient of the logits (Backward). kernels/cross_entropy.h has
// the formulas.
//
// Memory bandwidth bounds both kernels: a row of 128256 bf16 logits has 256 KB. In the forward a thread group of at most one block
// processes a row. Each thread loads 16-byte vectors that are one group width apart, with several loads in flight. It keeps an online
// maximum and sum, so that the row is read once, and the group exchanges values only at the end of the row. The backward has the
// log-sum-exp as an input, so its threads exchange nothing, and it processes tiles of rows (tiles.h).
//
// Rows may begin at any address (an odd vocabulary size): the elements before the first aligned vector and behind the last whole vector are
// accessed singly, at most one per thread. The backward accesses whole rows element by element only if the rows of the gradient and of the
// logits have different offsets modulo 16 bytes. `Full` is the instance for options that cost instructions per element (softcap, label
// smoothing, argmax), and for access element by element.
#include "gpu/cross_entropy_launch.h"
#include "gpu/tiles.h"

namespace liger::gpu {
namespace {

struct ForwardArgs {
  LogitRows rows;
  RowOutputs out;
};

// Layout: threads per row (one block per row) as a compile-time constant, which saves instructions before a row's first load. 0: the plan
// sets the number at run time.
template <class T, int N, bool Full, int Layout> struct Forward {
  using Args = ForwardArgs;
  static constexpr int max_threads = launch::cross_entropy_forward_kernel.instance(N, launch::none, Layout).max_threads,
                       min_blocks = Layout > 0 ? 8 : 2;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    let_next_kernel_start();
    BasicRowGroup<Layout, false> group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group.first_row(), group.index == 0, true);
    const RowWalk<T, N> columns(row.valid ? a.vocab : 0, group, row.valid ? unaligned_head<N>(row.data, a.vocab) : 0);
    const bool want_best = Full && args.out.want_best();

    RowStatistics<T, Full> statistics(row.anchor(a));
    columns.template walk<launch::logits_in_flight(Full)>([&](auto& raw, int, int column) { load<Hint::stream>(raw, row.data + column); },
                                                          [&](const auto& raw, int, int column) {
                                                            float x[N];
                                                            widen(x, raw);
                                                            statistics.add(a, x, column, want_best);
                                                          });
    if (columns.single >= 0) {
      float x[1] = {to_float(row.data[columns.single])};
      statistics.add(a, x, columns.single, want_best);
    }
    statistics.merge(group);
    wait_for_previous_kernel();  // it may be the one that writes the counts
    if (group.index == 0 && row.live) {
      const float log_sum = statistics.log_sum();
      write_losses(a, args.out, row, statistics.weighted, statistics.best_column, LogSumExp::compute<T>(statistics, log_sum),
                   statistics.base() - row.target_logit(a) + log_sum);
    }
  }
};

template <class T, int N, bool Full, bool LogProbs> struct Backward {
  struct Args {
    Tiles tiles;
    LogitRows rows;
    const float *lse, *token;
    const float* mix;  // nullptr: no gradient of the entropy
    Rows grad;  // the upstream gradient; no data: dlogits gets the unreduced gradient
    float gradient_scale;  // factor of the unreduced gradient
    MutableRows dlogits;
    Classes classes;
    bool stored;
  };
  static constexpr int max_threads = launch::cross_entropy_backward_kernel.instance(N).max_threads, K = launch::logit_tile_k(N);

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    const Tile<N, K> tile(args.tiles);
    if (!tile.live()) return;
    const int64_t at = tile.row;
    const T* const logits = static_cast<const T*>(a.logits) + at * a.stride;
    const RowTile<N, K> part = tile.part(unaligned_head<N>(logits, a.vocab));
    TileValues<T, N, K> x;
    part.template load<Hint::in_place>(x, logits);  // dlogits may be the same memory
    const LogitRow<T, Full, LogProbs> row(a, args.classes, at, tile.number == 0 && tile.index == 0, false);
    const bool has_lse = !LogProbs || args.lse;
    const float lse = has_lse ? args.lse[at] : 0.f, lse_low = has_lse ? args.lse[a.rows + at] : 0.f,
                token = a.token_scaling ? args.token[at] : 1.f;
    const LossGradients grad = args.grad.data ? LossGradients(a, args.grad, at) : LossGradients(a, args.gradient_scale);
    RowGradient<T, LogProbs> gradient(a, row, lse, lse_low, 1.f, lse, token, grad.ce, grad.z);
    if (LogProbs && args.mix) gradient.take(args.mix + 4 * at, args.gradient_scale, args.stored);
    T* const out = opaque(static_cast<T*>(args.dlogits.data) + at * args.dlogits.stride);
    part.for_each(
        [&](const auto& logit, int64_t column) {
          auto g = gradient.template compute<Full>(a, logit, int(column), row.target);
          if (!row.valid) g = same_value(g, row.ignored ? 0.f : not_a_number());
          store<Hint::stream>(out + column, g);
        },
        x);
  }
};

}  // namespace

void cross_entropy_forward(const CrossEntropyRows& op, Stream stream) {
  if (op.rows == 0 || op.vocab == 0) return;
  const bool full = launch::is_full(op);
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  const ForwardArgs args{logit_rows(op, op.vocab, config.plan, stream), row_outputs(op)};
  with_logits<launch::cross_entropy_forward_kernel>(config, op.logits.dtype, full, [&]<class T, bool Full, Instance I>() {
    launch<Forward<T, I.vec, Full, I.row_layout>>(config, args, stream);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& op, Stream stream) {
  require(op.dlogits.dtype == op.logits.dtype, op.op, ": the gradient of the logits must have their dtype");
  if (op.rows == 0 || op.vocab == 0) return;
  const bool full = launch::is_full(op);
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  const bool log_probs = launch::needs_log_probs(op);
  const auto launch_it = [&]<class T, int N, bool Full, bool LogProbs>() {
    launch<Backward<T, N, Full, LogProbs>>(
        config,
        {Tiles(config), logit_rows(op, op.classes.all, config.plan, stream), static_cast<const float*>(op.lse),
         static_cast<const float*>(op.token), static_cast<const float*>(op.mix), op.grad, float(op.gradient_scale), op.dlogits, op.classes,
         op.stored},
        stream);
  };
  with_logits<launch::cross_entropy_backward_kernel>(config, op.logits.dtype, full, [&]<class T, bool Full, Instance I>() {
    constexpr bool in_place = Full && I.vec > 1;  // for log-probabilities, whose dlogits overwrites the logits
    if constexpr (in_place)
      if (log_probs) return launch_it.template operator()<T, I.vec, true, true>();
    require(!log_probs, op.op, ": the gradient of log-probabilities requires logits and dlogits of the same alignment");
    launch_it.template operator()<T, I.vec, Full, false>();
  });
}

}  // namespace liger::gpu
