// Cross entropy over rows of logits: the losses (forward) and their gradient (backward).
//
// Both are bound by memory: a vocabulary of 128256 bf16 logits is 256 KB a row. A row belongs to one group of threads, at most one
// block; each thread takes 16-byte vectors one group width apart, several in flight. The forward keeps an online maximum and sum per
// thread, so that one read is enough, and the group meets only at the end of the row. The backward knows lse and needs no meeting.
//
// Rows may begin at any address (an odd vocabulary): what is before the first and behind the last whole vector is a thread's each.
// Only a gradient whose rows begin elsewhere within 16 bytes than those of the logits is made one element at a time. `Full` has the options
// that cost instructions per element (softcap, label smoothing, argmax).
#include "gpu/cross_entropy_launch.h"
#include "gpu/tiles.h"

namespace liger::gpu {
namespace {

struct ForwardArgs {
  LogitRows rows;
  RowOutputs out;
};

// Threads: the number of threads of each row, which is a block's, if the compiler is to know it: that saves instructions before a row's
// first load. 0: the plan says it at run time.
template <class T, int N, bool Full, int Threads> struct Forward {
  using Args = ForwardArgs;
  static constexpr int max_threads = launch::cross_entropy_forward_kernel.instance(N, launch::none, Threads).max_threads,
                       min_blocks = Threads > 0 ? 8 : 2;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    let_next_kernel_start();
    RowGroupOf<Threads, false> group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group.first_row(), group.index == 0, true);
    const RowWalk<T, N> own(row.valid ? a.vocab : 0, group, row.valid ? unaligned_head<N>(row.data, a.vocab) : 0);
    const bool want_best = Full && args.out.want_best();

    RowStatistics<T, Full> statistics(row.anchor(a));
    own.template walk<launch::logits_in_flight(Full)>([&](auto& raw, int, int column) { load<Hint::stream>(raw, row.data + column); },
                                                      [&](const auto& raw, int, int column) {
                                                        float x[N];
                                                        widen(x, raw);
                                                        statistics.add(a, x, column, want_best);
                                                      });
    if (own.single >= 0) {
      float x[1] = {to_float(row.data[own.single])};
      statistics.add(a, x, own.single, want_best);
    }
    statistics.merge(group);
    wait_for_previous_kernel();  // which made the counts
    if (group.index == 0 && row.live) {
      const float log_sum = statistics.log_sum();
      write_losses(a, args.out, row, statistics.weighted, statistics.best_column, LogSumExp::of<T>(statistics, log_sum),
                   statistics.base() - row.target_logit(a) + log_sum);
    }
  }
};

template <class T, int N, bool Full, bool Tokens> struct Backward {
  struct Args {
    Tiles tiles;
    LogitRows rows;
    const float *lse, *token;
    const float* mix;  // nullptr: no gradient of the entropy
    Rows grad;  // null: unreduced
    float gradient_scale;  // of the unreduced
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
    part.template load<Hint::in_place>(x, logits);  // which may be overwritten
    const LogitRow<T, Full, Tokens> row(a, args.classes, at, tile.number == 0 && tile.index == 0, false);
    const bool has_lse = !Tokens || args.lse;
    const float lse = has_lse ? args.lse[at] : 0.f, lse_low = has_lse ? args.lse[a.rows + at] : 0.f,
                token = a.token_scaling ? args.token[at] : 1.f;
    const LossGradients grad = args.grad.data ? LossGradients(a, args.grad, at) : LossGradients(a, args.gradient_scale);
    RowGradient<T, Tokens> gradient(a, row, lse, lse_low, 1.f, lse, token, grad.ce, grad.z);
    if (Tokens && args.mix) gradient.take(args.mix + 4 * at, args.gradient_scale, args.stored);
    T* const out = opaque(static_cast<T*>(args.dlogits.data) + at * args.dlogits.stride);
    part.for_each(
        [&](const auto& logit, int64_t column) {
          auto g = gradient.template of<Full>(a, logit, int(column), row.target);
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
  const launch::Launch made = launch::launch_of(device_profile(stream.device), op);
  const ForwardArgs args{logit_rows(op, op.vocab, made.plan, stream), row_outputs(op)};
  with_logits<launch::cross_entropy_forward_kernel>(made, op.logits.dtype, full, [&]<class T, bool Full, Instance I>() {
    launch<Forward<T, I.vec, Full, I.threads>>(made, args, stream);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& op, Stream stream) {
  require(op.dlogits.dtype == op.logits.dtype, op.op, ": the gradient of the logits must have their dtype");
  if (op.rows == 0 || op.vocab == 0) return;
  const bool full = launch::is_full(op);
  const launch::Launch made = launch::launch_of(device_profile(stream.device), op);
  const bool tokens = launch::is_of_tokens(op);
  const auto launch_it = [&]<class T, int N, bool Full, bool Tokens>() {
    launch<Backward<T, N, Full, Tokens>>(made,
                                         {Tiles(made), logit_rows(op, op.classes.all, made.plan, stream), static_cast<const float*>(op.lse),
                                          static_cast<const float*>(op.token), static_cast<const float*>(op.mix), op.grad,
                                          float(op.gradient_scale), op.dlogits, op.classes, op.stored},
                                         stream);
  };
  with_logits<launch::cross_entropy_backward_kernel>(made, op.logits.dtype, full, [&]<class T, bool Full, Instance I>() {
    constexpr bool in_place = Full && I.vec > 1;  // as all gradients of log-probabilities are: no instance of single elements
    if constexpr (in_place)
      if (tokens) return launch_it.template operator()<T, I.vec, true, true>();
    require(!tokens, op.op, ": no kernel for a gradient of log-probabilities beside its logits");
    launch_it.template operator()<T, I.vec, Full, false>();
  });
}

}  // namespace liger::gpu
