// The fused loss's kernels: they compute the losses of rows of logits, and overwrite the logits by their gradient.
//
// Memory bandwidth bounds them: ideally each row is read once and written once. But the gradient needs the row again after the row's sum,
// and a row of 128256 bf16 logits has 256 KB. The second limit is the special function units: two exponentials per element take half of
// their throughput at full clocks.
// InPlaceHeld: a block holds a row or several short ones, or up to eight blocks hold a row where there are clusters: up to 8 vectors per
// thread in registers, the rest of longer rows in shared memory. The hardware starts the blocks of a row as earlier blocks end, so the
// blocks of a multiprocessor are at different points of their rows, and memory is always busy. Instructions per element are few: the sums
// of a loss without options test no columns of the vectors in registers, since elements past the end of the row are -inf, and no
// loop multiplies by its gradient's factor, which is part of the exponent (of 16-bit logits). Options (Full) leave registers for 4 vectors.
// InPlace, for the other rows: very short rows, unaligned rows, rows that are too long (mostly where there are no clusters), and rows of a
// loss with options if the logits are fp32 or there are no clusters. A thread copies the vectors that it reads to shared memory, up to the
// plan's number of slots, and computes their gradient from there. It reads the other vectors again, from the L2 if possible: for this the
// plan limits how many rows are in flight.
#include "gpu/held_arguments.h"

namespace liger::gpu {
namespace {

struct SlotArgs : InPlaceArgs {
  int slots;  // vectors that a thread stores in shared memory
};

template <class T, int N, bool Full> struct InPlace {
  using Args = SlotArgs;
  static constexpr int max_threads = launch::in_place_kernel.instance(N).max_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    RowGroup group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group.first_row(), group.index == 0, true);
    const RowWalk<T, N> columns(row.valid ? a.vocab : 0, group);
    const LossGradients grad(a, args.gradient_scale);
    const bool want_best = Full && args.out.want_best();
    Shared<Packed<T, N>> stash = shared<Packed<T, N>>(args.shared_offset) + thread_id();
    const int slots = args.slots, pitch = block_threads();

    RowStatistics<T, Full> statistics(row.anchor(a));
    columns.template walk<launch::logits_in_flight(Full)>([&](auto& raw, int, int column) { load(raw, row.data + column); },
                                                          [&](const auto& raw, int slot, int column) {
                                                            if (slot < slots) stash[slot * pitch] = raw;
                                                            float x[N];
                                                            widen(x, raw);
                                                            statistics.template add<N, true>(a, x, column, want_best);
                                                          });
    Packed<T, 1> last{};
    if (columns.single >= 0) {
      load(last, row.data + columns.single);
      float x[1] = {last[0]};
      statistics.add(a, x, columns.single, want_best);
    }
    statistics.merge(group);
    warp_barrier();  // every thread of the row has read the target's logit before the first gradient is written

    const float log_sum = statistics.log_sum();
    const LogSumExp lse{statistics.base() + log_sum, 0};
    const float negative_log = statistics.base() - row.target_logit(a) + log_sum;
    if (group.index == 0 && row.live) write_losses(a, args.out, row, statistics.weighted, statistics.best_column, lse, negative_log);
    if (!row.live) return;
    T* const out = const_cast<T*>(row.data);
    if (!row.valid) return RowWalk<T, N>(a.vocab, group).fill(out, row.ignored ? 0.f : not_a_number());

    const RowGradient<T> gradient(a, row, statistics.base(), 0.f, 1 / statistics.sum, lse.high, row_token<T>(a, negative_log), grad.ce,
                                  grad.z);
    auto write = [&](const auto& raw, int, int column) {
      store<Hint::stream>(out + column, gradient.template compute<Full>(a, raw, column, row.target));
    };
    columns.template walk<1>(0, slots, [&](auto& raw, int slot, int) { raw = stash[slot * pitch]; }, write);
    columns.template walk<launch::logits_in_flight(Full)>(
        slots, columns.slots(), [&](auto& raw, int, int column) { load<Hint::in_place>(raw, row.data + column); }, write);
    if (columns.single >= 0) store(out + columns.single, gradient.template compute<Full>(a, last, columns.single, row.target));
  }
};

// Holds rows in registers and shared memory. K: vectors per thread in registers. Full: with options that cost instructions per element, or
// whose gradient depends on the target's logit (token scaling). Chunked: a row lies in several matrices.
template <class T, int N, int K, bool Full, bool Chunked> struct InPlaceHeld {
  using Args = std::conditional_t<Chunked, HeldChunksArgs, HeldArgs>;
  static constexpr int max_threads = launch::in_place_held.instance(N, K).max_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    BasicRowGroup<0, true> group(a.threads_per_row);
    const bool first = group.index == 0;
    const int at = int(group.first_row()), cols = args.columns();
    const auto logits = args.template logits<T>(at);
    HeldLogits<T, N, K, decltype(logits)> held(logits, group, should_load(args, at) ? cols : 0, args.shared_offset);
    const LogitRow<T, Full> row(a, at, first, false);
    if (row.valid) held.load_single(group, cols);
    // Only the thread that owns the target's column loads and overwrites the target's logit by itself; it also writes the losses
    // (unless no chunk contains the target).
    const bool has_target = row.valid && held.owns(row.target, cols / N * N, group);
    Packed<T, 1> raw_target{};
    if (has_target) load(raw_target, logits.from(row.target)(0));
    const LossGradients grad(a, args.gradient_scale);

    Exponentials exponentials;
    HeldOptions<T> options{a};
    if constexpr (Full) options.take(held, exponentials);
    else exponentials = thread_exponentials<T>(held);
    exponentials.merge<bf16>(group);  // bf16 for fp32 logits, too: it selects the fast exponential
    float target_logit = raw_target[0];
    if constexpr (Full) {
      if (a.softcap != 0) target_logit = capped_exponent<T>(a, target_logit) * ln_2;
      options.merge(held, group, exponentials, has_target, target_logit, args.out.want_best());
    }
    bool writes = row.valid ? has_target : first && row.live;
    if constexpr (Chunked) {
      using Slots = CrossEntropyStatistics;
      if (args.others && row.valid) {
        const auto statistic = [&](Slots::Slot slot) { return args.others[slot * a.rows + at]; };
        exponentials.join<bf16>({statistic(Slots::maximum), statistic(Slots::sum)});
        if (row.target >= cols) {
          target_logit = statistic(Slots::target);
          writes = first;
        }
      }
    }
    const float log_sum = exponentials.log_sum();
    const LogSumExp lse{exponentials.base() + log_sum, 0};
    const float negative_log = exponentials.base() - target_logit + log_sum;
    if (writes) write_losses(a, args.out, row, options.weighted, options.best_column, lse, negative_log);
    if (!row.live) return;
    if (!row.valid) return held.fill(row.ignored ? 0.f : not_a_number(), group, cols);

    const RowGradient<T> gradient(a, row, exponentials.base(), 0.f, 1 / exponentials.sum, lse.high, row_token<T>(a, negative_log), grad.ce,
                                  grad.z);
    if constexpr (Full) options.replace(held, gradient);
    else replace_by_probabilities(held, gradient.exp, gradient.scale, log2_e);
    if (has_target) store(logits.from(row.target)(0), gradient.template compute<Full>(a, raw_target, row.target, row.target));
  }
};

}  // namespace

void cross_entropy_in_place(const CrossEntropyInPlace& op, Stream stream) {
  const CrossEntropyRows& row = op.row;
  if (row.rows == 0 || row.vocab == 0) return;
  const bool full = launch::is_full(row);
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  const InPlaceArgs common = in_place_args(row, row.vocab, op.gradient_scale, config, stream);
  if (config.is(launch::in_place_kernel)) {
    const SlotArgs args{common, config.plan.slots};
    return with_logits<launch::in_place_kernel>(
        config, row.logits.dtype, full, [&]<class T, bool Full, Instance I>() { launch<InPlace<T, I.vec, Full>>(config, args, stream); });
  }
  const HeldArgs args{common, min_valid_targets(op.batch_rows)};
  dispatch(row.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr auto whole = [](const Instance& instance) { return fits<T>(instance) && instance.k != launch::held_with_chunks; };
    with_instance<launch::in_place_held, whole>(
        config, [&]<Instance I>() { launch<InPlaceHeld<T, I.vec, I.k, I.k == launch::held_with_options, false>>(config, args, stream); });
  });
}

bool cross_entropy_takes_chunks(const CrossEntropyInChunks& op, Stream stream) {
  return launch::op_launches(device_profile(stream.device), op).size() > 0;
}

void cross_entropy_in_chunks(const CrossEntropyInChunks& op, Stream stream) {
  const launch::Launches launches = launch::op_launches(device_profile(stream.device), op);
  const launch::Launch& config = *launches.begin();
  if (config.is(launch::in_place_log_probs)) return log_probs_in_place(op, config, stream);
  const HeldChunksArgs args = held_chunks_args(op, config, stream);
  dispatch(op.row.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr auto in_chunks = [](const Instance& instance) { return fits<T>(instance) && instance.k == launch::held_with_chunks; };
    if constexpr (sizeof(T) == 2)
      with_instance<launch::in_place_held, in_chunks>(
          config, [&]<Instance I>() { launch<InPlaceHeld<T, I.vec, I.k, false, true>>(config, args, stream); });
  });
}

}  // namespace liger::gpu
