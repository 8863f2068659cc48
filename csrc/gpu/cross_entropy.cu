// Cross entropy over rows of logits: the losses (forward), their gradient (backward), and both in one pass over a buffer that
// becomes its own gradient (in place, for the fused loss).
//
// All three are bound by memory: a vocabulary of 128256 bf16 logits is 256 KB a row. A row belongs to one group of threads, at
// most one block; each thread takes 16-byte vectors one group width apart, several in flight. The forward keeps an online
// maximum and sum per thread, so that one read is enough, and the group meets only at the end of the row. The backward knows
// lse and needs no meeting at all. The in-place kernel needs a row twice: a thread puts what it reads into its own slots of
// shared memory, as many as the plan gives it, and takes the gradient from there; what has no slot is read again, and the plan
// bounds these parts of all rows in flight by the L2. Other blocks on the same multiprocessor keep the memory busy while a row
// is being summed.
//
// `Full` has the options that cost instructions per element (softcap, label smoothing, argmax); unaligned rows, read one element at
// a time, always run it.
#include "gpu/cross_entropy_rows.h"
#include "gpu/platform.h"

namespace liger::gpu {
namespace {

// Vectors a thread fetches before it uses the first; fewer where the options need the registers.
template <bool Full> constexpr int in_flight = Full ? 2 : 4;

// The per-row results of a forward.
struct RowOutputs {
  float *ce, *z, *lse, *accuracy;
  int64_t* predicted;

  LIGER_DEVICE bool want_best() const { return accuracy != nullptr || predicted != nullptr; }
  template <class T, bool Full>
  LIGER_DEVICE void write(const LogitRow<T, Full>& row, float ce_value, float z_value, float lse_value, int64_t best) const {
    if (ce) ce[row.row] = ce_value;
    if (z) z[row.row] = z_value;
    if (lse) lse[row.row] = lse_value;
    if (accuracy) accuracy[row.row] = row.valid && best == row.target ? 1.f : 0.f;
    if (predicted) predicted[row.row] = best;
  }
};

// One thread of the row calls this. negative_log = lse - x'[target].
template <class T, bool Full>
LIGER_DEVICE void write_losses(const LogitRows& a, const RowOutputs& out, const LogitRow<T, Full>& row,
                               const RowStatistics<T, Full>& statistics, float lse, float negative_log) {
  if (!row.valid) {
    const float value = row.ignored ? 0.f : not_a_number();
    return out.write(row, value, value, value, -1);
  }
  float ce = a.hard_share * row.target_weight * negative_log;
  if (a.class_share != 0) ce += a.class_share * (a.counts[CrossEntropyCounts::weight] * lse - statistics.weighted);
  float z = a.lse_square_scale != 0 ? a.lse_square_scale * lse * lse : 0.f;
  if (a.token_scaling) {
    const float token = fast_exp(-negative_log);
    ce *= token;
    z *= token;
  }
  out.write(row, ce, z, lse, statistics.best_column);
}

template <class T, int N, bool Full> struct Forward {
  struct Args {
    LogitRows rows;
    RowOutputs out;
  };
  static constexpr int max_threads = launch::logits_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    RowGroup group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group);
    const RowWalk<T, N> own(row.valid ? a.vocab : 0, group);
    const bool want_best = Full && args.out.want_best();

    RowStatistics<T, Full> statistics;
    own.template walk<in_flight<Full>>([&](auto& raw, int, int column) { load<Hint::stream>(raw, row.data + column); },
                                       [&](const auto& raw, int, int column) {
                                         float x[N];
                                         widen(x, raw);
                                         statistics.add(a, x, column, want_best);
                                       });
    if (own.tail >= 0) {
      float x[1] = {to_float(row.data[own.tail])};
      statistics.add(a, x, own.tail, want_best);
    }
    statistics.merge(group);
    if (group.index == 0 && row.live) {
      const float log_sum = statistics.log_sum();
      write_losses(a, args.out, row, statistics, statistics.base() + log_sum, statistics.base() - row.target_logit + log_sum);
    }
  }
};

template <class T, int N, bool Full> struct Backward {
  struct Args {
    LogitRows rows;
    const float* lse;
    Rows grad;
    void* dlogits;
    int64_t dlogits_stride;
  };
  static constexpr int max_threads = launch::logits_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    const RowGroup group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group);
    const RowWalk<T, N> own(row.live ? a.vocab : 0, group);
    T* const out = opaque(static_cast<T*>(args.dlogits) + row.row * args.dlogits_stride);
    if (!row.valid) return own.fill(out, row.ignored ? 0.f : not_a_number());

    const float lse = args.lse[row.row], grad = load_one(args.grad.data, args.grad.dtype, row.row * args.grad.stride);
    const RowGradient<T> gradient(a, row, lse, 1, lse, lse - row.target_logit, grad * a.counts[CrossEntropyCounts::ce_scale],
                               grad * a.counts[CrossEntropyCounts::z_scale]);
    own.template walk<in_flight<Full>>([&](auto& raw, int, int column) { load<Hint::stream>(raw, row.data + column); },
                                       [&](const auto& raw, int, int column) {
                                         store<Hint::stream>(out + column, gradient.template of<Full>(a, raw, column, row.target));
                                       });
    if (own.tail >= 0) {
      Packed<T, 1> raw;
      load(raw, row.data + own.tail);
      store(out + own.tail, gradient.template of<Full>(a, raw, own.tail, row.target));
    }
  }
};

template <class T, int N, bool Full> struct InPlace {
  struct Args {
    LogitRows rows;
    RowOutputs out;
    Rows row_grad;
    float gradient_scale;
    void* gradient;  // may be the logits
    int64_t gradient_stride;
    int stash_slots, stash_offset;
  };
  static constexpr int max_threads = launch::row_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    RowGroup group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group);
    const RowWalk<T, N> own(row.valid ? a.vocab : 0, group);
    const bool want_best = Full && args.out.want_best();
    Shared<Packed<T, N>> stash = shared<Packed<T, N>>(args.stash_offset) + thread_id();
    const int slots = args.stash_slots, pitch = block_threads();

    RowStatistics<T, Full> statistics;
    own.template walk<in_flight<Full>>([&](auto& raw, int, int column) { load(raw, row.data + column); },
                                       [&](const auto& raw, int slot, int column) {
                                         if (slot < slots) stash[slot * pitch] = raw;
                                         float x[N];
                                         widen(x, raw);
                                         statistics.add(a, x, column, want_best);
                                       });
    Packed<T, 1> last{};
    if (own.tail >= 0) {
      load(last, row.data + own.tail);
      float x[1] = {last[0]};
      statistics.add(a, x, own.tail, want_best);
    }
    statistics.merge(group);
    warp_barrier();  // every thread of the row has read the target's logit before the first gradient is written

    const float log_sum = statistics.log_sum(), lse = statistics.base() + log_sum;
    const float negative_log = statistics.base() - row.target_logit + log_sum;
    if (group.index == 0 && row.live) write_losses(a, args.out, row, statistics, lse, negative_log);
    if (!row.live) return;
    T* const out = opaque(static_cast<T*>(args.gradient) + row.row * args.gradient_stride);
    if (!row.valid) return RowWalk<T, N>(a.vocab, group).fill(out, row.ignored ? 0.f : not_a_number());

    float grad = args.gradient_scale;
    if (args.row_grad.data) grad *= load_one(args.row_grad.data, args.row_grad.dtype, row.row * args.row_grad.stride);
    const float ce_scale = a.counts[CrossEntropyCounts::ce_scale];
    const float z_grad = ce_scale == 0 ? 0.f : grad * (a.counts[CrossEntropyCounts::z_scale] / ce_scale);
    const RowGradient<T> gradient(a, row, statistics.base(), 1 / statistics.sum, lse, negative_log, grad, z_grad);
    auto write = [&](const auto& raw, int, int column) {
      store<Hint::stream>(out + column, gradient.template of<Full>(a, raw, column, row.target));
    };
    own.template walk<1>(0, slots, [&](auto& raw, int slot, int) { raw = stash[slot * pitch]; }, write);
    own.template walk<in_flight<Full>>(
        slots, own.slots(), [&](auto& raw, int, int column) { load<Hint::stream>(raw, row.data + column); }, write);
    if (own.tail >= 0) store(out + own.tail, gradient.template of<Full>(a, last, own.tail, row.target));
  }
};

template <class Op> LogitRows logit_rows(const Op& op, const launch::LaunchPlan& plan, Stream stream) {
  const CrossEntropyOptions& o = op.options;
  require(op.vocab <= int64_t{1} << 30, op.op, ": a vocabulary of ", op.vocab, " is more than the GPU kernels address (2^30)");
  return {op.rows,
          op.vocab,
          op.first_row,
          op.logits.stride,
          op.logits.data,
          op.target,
          op.class_weight,
          static_cast<const float*>(op.counts),
          o.ignore_index,
          float(1 - o.label_smoothing),
          float(o.label_smoothing / double(op.vocab)),
          float(o.lse_square_scale),
          float(o.softcap),
          o.softcap == 0 ? 0.f : float(1 / o.softcap),
          o.token_scaling,
          plan.threads_per_row,
          target_report(op.op, stream.device)};
}

RowOutputs row_outputs(const CrossEntropyRows& op) {
  return {static_cast<float*>(op.ce), static_cast<float*>(op.z), static_cast<float*>(op.lse), static_cast<float*>(op.accuracy),
          op.predicted};
}

// Plans for `op`, picks the instantiation of K and launches it; set(args, plan) adds what only that kernel takes.
template <template <class, int, bool> class K, class Op, class Set>
void launch_rows(const Op& op, bool vectors, bool full, bool stash, Stream stream, Set set) {
  if (op.rows == 0 || op.vocab == 0) return;
  dispatch(op.logits.dtype, [&](auto element) {
    using T = std::remove_cvref_t<decltype(element)>;
    auto start = [&](auto kernel, int vec) {
      using Kernel = std::remove_cvref_t<decltype(kernel)>;
      const launch::LaunchPlan plan =
          launch::plan_cross_entropy(device_profile(stream.device), op.rows, op.vocab, int(sizeof(T)), vec, stash);
      typename Kernel::Args args{logit_rows(op, plan, stream)};
      set(args, plan);
      launch<Kernel>(plan, args, stream);
    };
    constexpr int width = 16 / int(sizeof(T));
    if (!vectors) start(K<T, 1, true>{}, 1);
    else if (full) start(K<T, width, true>{}, width);
    else start(K<T, width, false>{}, width);
  });
}

// Vectors need every row start aligned; how many columns there are does not matter.
template <class Op> bool vectors_fit(const Op& op) { return aligned(op.logits, 0) && aligned(op.class_weight, 0); }
bool costly_options(const CrossEntropyOptions& o) { return o.softcap != 0 || o.label_smoothing != 0; }

}  // namespace

void cross_entropy_forward(const CrossEntropyRows& op, Stream stream) {
  const bool full = costly_options(op.options) || op.accuracy || op.predicted;
  launch_rows<Forward>(op, vectors_fit(op), full, false, stream, [&](auto& args, const auto&) { args.out = row_outputs(op); });
}

void cross_entropy_backward(const CrossEntropyBackward& op, Stream stream) {
  require(op.dlogits.dtype == op.logits.dtype, op.op, ": the gradient of the logits must have their dtype");
  launch_rows<Backward>(op, vectors_fit(op) && aligned(op.dlogits, 0), costly_options(op.options), false, stream,
                        [&](auto& args, const auto&) {
                          args.lse = static_cast<const float*>(op.lse);
                          args.grad = op.grad;
                          args.dlogits = op.dlogits.data;
                          args.dlogits_stride = op.dlogits.stride;
                        });
}

void cross_entropy_in_place(const CrossEntropyInPlace& op, Stream stream) {
  const CrossEntropyRows& row = op.row;
  require(op.gradient.dtype == row.logits.dtype, row.op, ": the gradient of the logits must have their dtype");
  const bool full = costly_options(row.options) || row.accuracy || row.predicted;
  launch_rows<InPlace>(row, vectors_fit(row) && aligned(op.gradient, 0), full, true, stream, [&](auto& args, const auto& plan) {
    args.out = row_outputs(row);
    args.row_grad = op.row_grad;
    args.gradient_scale = float(op.gradient_scale);
    args.gradient = op.gradient.data;
    args.gradient_stride = op.gradient.stride;
    args.stash_slots = plan.k;
    args.stash_offset = RowGroup::shared_bytes<2>();
  });
}

}  // namespace liger::gpu
