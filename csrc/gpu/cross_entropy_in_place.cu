// The fused loss's kernel: the losses of rows of logits, and their gradient in the place of the logits.
//
// Bound by memory, a read and a write of each row; but a row is needed twice, and of 128256 bf16 logits it has 256 KB.
// Stream: where there are bulk copies, a cluster of blocks holds a row in its shared memory, brought there in pieces; each thread reads
// its columns twice from there, and a warp asks for a piece of the next row when it has written that of the gradient: the next row's
// first pieces are there when this row ends. A few clusters on the same multiprocessors are at different points of their rows, so that
// the memory always has something to do.
// Elsewhere, and with options that cost instructions per element, a row belongs to a block: a thread puts what it reads into its own
// slots of shared memory, as many as the plan gives it, and takes the gradient from there; what has no slot is read again, and the
// plan bounds these parts of all rows in flight by the L2.
#include "gpu/cross_entropy_launch.h"
#include "gpu/row_stream.h"

namespace liger::gpu {
namespace {

struct InPlaceArgs {
  LogitRows rows;
  RowOutputs out;
  Rows row_grad;
  float gradient_scale;
  void* gradient;  // may be the logits
  int64_t gradient_stride;
  int slots;          // vectors of a thread in shared memory
  int shared_offset;  // where they begin
};

// z_loss's share of the gradient, relative to the loss's.
LIGER_DEVICE float z_share(const LogitRows& a) {
  const float ce_scale = a.counts[CrossEntropyCounts::ce_scale];
  return ce_scale == 0 ? 0.f : a.counts[CrossEntropyCounts::z_scale] / ce_scale;
}
// The gradient that a row's losses have: what both kernels know of it once they have its statistics.
template <class T, bool Full>
LIGER_DEVICE RowGradient<T> gradient_of(const InPlaceArgs& args, const LogitRow<T, Full>& row, const RowStatistics<T, Full>& statistics,
                                        float lse, float negative_log, float z_share) {
  float grad = args.gradient_scale;
  if (args.row_grad.data) grad *= load_one(args.row_grad.data, args.row_grad.dtype, row.row * args.row_grad.stride);
  return {args.rows, row, statistics.base(), 1 / statistics.sum, lse, negative_log, grad, grad * z_share};
}

template <class T, int N, bool Full> struct InPlace {
  using Args = InPlaceArgs;
  static constexpr int max_threads = launch::row_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    RowGroup group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group.first_row(), group.index == 0, true);
    const RowWalk<T, N> own(row.valid ? a.vocab : 0, group);
    const bool want_best = Full && args.out.want_best();
    Shared<Packed<T, N>> stash = shared<Packed<T, N>>(args.shared_offset) + thread_id();
    const int slots = args.slots, pitch = block_threads();

    RowStatistics<T, Full> statistics;
    own.template walk<launch::logits_in_flight(Full)>([&](auto& raw, int, int column) { load(raw, row.data + column); },
                                                      [&](const auto& raw, int slot, int column) {
                                                        if (slot < slots) stash[slot * pitch] = raw;
                                                        float x[N];
                                                        widen(x, raw);
                                                        statistics.add(a, x, column, want_best);
                                                      });
    Packed<T, 1> last{};
    if (own.single >= 0) {
      load(last, row.data + own.single);
      float x[1] = {last[0]};
      statistics.add(a, x, own.single, want_best);
    }
    statistics.merge(group);
    warp_barrier();  // every thread of the row has read the target's logit before the first gradient is written

    const float log_sum = statistics.log_sum(), lse = statistics.base() + log_sum;
    const float negative_log = statistics.base() - row.target_logit(a) + log_sum;
    if (group.index == 0 && row.live) write_losses(a, args.out, row, statistics, lse, negative_log);
    if (!row.live) return;
    T* const out = opaque(static_cast<T*>(args.gradient) + row.row * args.gradient_stride);
    if (!row.valid) return RowWalk<T, N>(a.vocab, group).fill(out, row.ignored ? 0.f : not_a_number());

    const RowGradient<T> gradient = gradient_of(args, row, statistics, lse, negative_log, z_share(a));
    auto write = [&](const auto& raw, int, int column) {
      store<Hint::stream>(out + column, gradient.template of<Full>(a, raw, column, row.target));
    };
    own.template walk<1>(0, slots, [&](auto& raw, int slot, int) { raw = stash[slot * pitch]; }, write);
    own.template walk<launch::logits_in_flight(Full)>(
        slots, own.slots(), [&](auto& raw, int, int column) { load<Hint::stream>(raw, row.data + column); }, write);
    if (own.single >= 0) store(out + own.single, gradient.template of<Full>(a, last, own.single, row.target));
  }
};

template <class T, int N> struct InPlaceStream {
  using Args = InPlaceArgs;
  static constexpr int max_threads = launch::piece_threads, min_blocks = 3, piece = launch::logits_piece;

  static LIGER_DEVICE void run(const Args& args) {
    if (!has_bulk_copies) return;
    const LogitRows& a = args.rows;
    RowGroupOf<max_threads, true> group(a.threads_per_row);
    const int slots = args.slots, whole = int(a.vocab / N) * N, tail = whole + group.index < a.vocab ? whole + group.index : -1;
    const WarpShare share(group, whole / N);
    const int first = int(share.begin + share.lane) * N, end = int(share.end) * N, step = warp_width() * N;  // this thread's columns
    const int64_t rows_apart = group.teams();
    const float z_of_ce = z_share(a);
    int64_t next_target = group.first_row() < a.rows ? a.target[group.first_row()] : a.ignore_index;
    const Rows logits{a.logits, a.stride, dtype_of<T>};
    RowInPieces<RowGroupOf<max_threads, true>, T, N, piece> pieces(group, logits, group.first_row(), rows_apart, whole, slots,
                                                                   args.shared_offset);
    const auto ask_for_all = [&] {
      pieces.aim(a.is_class(next_target));
      for (int k = 0; k < slots; k += piece) pieces.ask(k / piece);
      pieces.turn();
    };
    ask_for_all();
    for (int64_t at = group.first_row(); at < a.rows; at += rows_apart) {
      const LogitRow<T, false> row(a, at, next_target, group.index == 0, false);
      next_target = at + rows_apart < a.rows ? a.target[at + rows_apart] : a.ignore_index;  // while this row is worked on
      T* const out = opaque(static_cast<T*>(args.gradient) + at * args.gradient_stride);
      Packed<T, 1> last{};
      if (row.valid && tail >= 0) load(last, row.data + tail);
      if (!row.valid) {
        ask_for_all();
        if (group.index == 0) write_losses(a, args.out, row, RowStatistics<T, false>{}, 0, 0);
        fill(out, first, step, end, tail, row.ignored ? 0.f : not_a_number());
        continue;
      }
      RowStatistics<T, false> own;
      float target_logit = 0;
      for (int k = 0; k < slots; k += piece) {
        pieces.wait(k / piece);
#pragma unroll
        for (int i = 0; i < piece; ++i) {
          const int column = first + (k + i) * step;
          if (column >= end) continue;
          Packed<T, N> raw;
          pieces.vector(raw, k + i);
          float x[N];
          widen(x, raw);
          own.add(a, x, column, false);
        }
      }
      if (tail >= 0) {
        float x[1] = {last[0]};
        own.add(a, x, tail, false);
        if (row.target == tail) target_logit = x[0];
      }
      const int to_target = row.target - first, slot = to_target / step;
      if (to_target >= 0 && row.target < end && to_target - slot * step < N) {
        Packed<T, N> raw;
        pieces.vector(raw, slot);
#pragma unroll
        for (int j = 0; j < N; ++j) target_logit = j == to_target - slot * step ? raw[j] : target_logit;
      }
      float merged[3] = {own.max, own.sum, target_logit};
      group.reduce(merged, [](float (&to)[3], const float (&from)[3]) {
        join_exponentials<bf16>(to, from);  // as of 16-bit logits: fast, in fp32 too
        to[2] += from[2];
      });
      own.max = merged[0];
      own.sum = merged[1];
      const float log_sum = own.log_sum(), lse = own.base() + log_sum, negative_log = own.base() - merged[2] + log_sum;
      if (group.index == 0) write_losses(a, args.out, row, own, lse, negative_log);
      const RowGradient<T> gradient = gradient_of(args, row, own, lse, negative_log, z_of_ce);
      pieces.aim(a.is_class(next_target));
      for (int k = 0; k < slots; k += piece) {
#pragma unroll
        for (int i = 0; i < piece; ++i) {
          const int column = first + (k + i) * step;
          if (column >= end) continue;
          Packed<T, N> raw;
          pieces.vector(raw, k + i);
          store<Hint::stream>(out + column, gradient.template of<false>(a, raw, column, row.target));
        }
        pieces.ask(k / piece);
      }
      pieces.turn();
      if (tail >= 0) store(out + tail, gradient.template of<false>(a, last, tail, row.target));
    }
  }

 private:
  LIGER_DEVICE static void fill(T* out, int first, int step, int end, int tail, float value) {
    const Packed<T, N> same = same_value(Packed<T, N>{}, value);
    for (int column = first; column < end; column += step) store<Hint::stream>(out + column, same);
    if (tail >= 0) out[tail] = from_float<T>(value);
  }
};

}  // namespace

void cross_entropy_in_place(const CrossEntropyInPlace& op, Stream stream) {
  const CrossEntropyRows& row = op.row;
  require(op.gradient.dtype == row.logits.dtype, row.op, ": the gradient of the logits must have their dtype");
  const bool vectors = vectors_fit(row) && aligned(op.gradient, 0), full = costly_options(row.options) || row.accuracy || row.predicted;
  const auto set = [&](InPlaceArgs& args, const launch::LaunchPlan& plan) {
    args.out = row_outputs(row);
    args.row_grad = op.row_grad;
    args.gradient_scale = float(op.gradient_scale);
    args.gradient = op.gradient.data;
    args.gradient_stride = op.gradient.stride;
    args.slots = plan.k;
    args.shared_offset = plan.ring_offset;
  };
  if constexpr (may_have_clusters)
    if (vectors && !full && row.rows > 0) {
      const launch::DeviceProfile& device = device_profile(stream.device);
      const int64_t bytes = size_of(row.logits.dtype);
      const launch::LaunchPlan plan = launch::plan_cross_entropy_stream(
          device, row.rows, row.vocab, int(bytes),
          launch::knobs_of(device, launch::Tunable::cross_entropy_in_place, 16 / bytes, row.rows, row.vocab));
      if (plan.path == launch::Path::stream)
        return dispatch(row.logits.dtype, [&](auto element) {
          using T = std::remove_cvref_t<decltype(element)>;
          InPlaceArgs args{logit_rows(row, plan, stream)};
          set(args, plan);
          launch<InPlaceStream<T, 16 / int(sizeof(T))>>(plan, args, stream);
        });
    }
  launch_rows<InPlace>(row, vectors, full, true, stream, set);
}

}  // namespace liger::gpu
