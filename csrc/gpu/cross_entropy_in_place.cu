// The fused loss's kernel: the losses of rows of logits, and their gradient in the place of the logits.
//
// Bound by memory, a read and a write of each row; but a row is needed twice, and of 128256 bf16 logits it has 256 KB. Two exponentials
// an element are the second limit, half of what the special function units can do at full clocks.
// Registers: a block holds a row in its threads' registers, where there are clusters up to eight blocks; 8 vectors a thread, or 10 or 16 of
// rows too long for that. The hardware starts a row's blocks where others have ended, so that those of a multiprocessor are at different
// points of their rows, and the memory always has something to do. Instructions count: none asks for an element's column, since what is
// not there is -inf, and none multiplies by the gradient's factor, which is part of the exponent.
// Longer and very short rows, and options that cost instructions per element: a thread puts what it reads into its own slots of shared
// memory, as many as the plan gives it, and takes the gradient from there; what has no slot is read again, and the plan bounds these
// parts of all rows in flight by the L2.
#include "gpu/cross_entropy_launch.h"
#include "gpu/rows.h"

namespace liger::gpu {
namespace {

struct InPlaceArgs {
  LogitRows rows;
  RowOutputs out;
  float gradient_scale;
  void* gradient;  // may be the logits
  int64_t gradient_stride;
  int slots;  // how many vectors a thread keeps in shared memory
  int shared_offset;  // where they begin, bytes
  float at_once_from;  // if at least this many targets of the batch are classes (not ignored), a row is loaded before its target is known
};

template <class T, int N, bool Full> struct InPlace {
  using Args = InPlaceArgs;
  static constexpr int max_threads = launch::in_place_kernel.instance(N).max_threads;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    RowGroup group(a.threads_per_row);
    const LogitRow<T, Full> row(a, group.first_row(), group.index == 0, true);
    const RowWalk<T, N> own(row.valid ? a.vocab : 0, group);
    const LossGradients grad(a, args.gradient_scale);
    const bool want_best = Full && args.out.want_best();
    Shared<Packed<T, N>> stash = shared<Packed<T, N>>(args.shared_offset) + thread_id();
    const int slots = args.slots, pitch = block_threads();

    RowStatistics<T, Full> statistics(row.anchor(a));
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

    const float log_sum = statistics.log_sum();
    const LogSumExp lse{statistics.base() + log_sum, 0};
    const float negative_log = statistics.base() - row.target_logit(a) + log_sum;
    if (group.index == 0 && row.live) write_losses(a, args.out, row, statistics, lse, negative_log);
    if (!row.live) return;
    T* const out = opaque(static_cast<T*>(args.gradient) + row.row * args.gradient_stride);
    if (!row.valid) return RowWalk<T, N>(a.vocab, group).fill(out, row.ignored ? 0.f : not_a_number());

    const RowGradient<T> gradient(a, row, statistics.base(), 0.f, 1 / statistics.sum, lse.high, row_token<T>(a, negative_log), grad.ce,
                                  grad.z);
    auto write = [&](const auto& raw, int, int column) {
      store<Hint::stream>(out + column, gradient.template of<Full>(a, raw, column, row.target));
    };
    own.template walk<1>(0, slots, [&](auto& raw, int slot, int) { raw = stash[slot * pitch]; }, write);
    own.template walk<launch::logits_in_flight(Full)>(
        slots, own.slots(), [&](auto& raw, int, int column) { load<Hint::in_place>(raw, row.data + column); }, write);
    if (own.single >= 0) store(out + own.single, gradient.template of<Full>(a, last, own.single, row.target));
  }
};

// A vocabulary that is cut into pieces: each piece is a range of classes, and its logits are a matrix of their own. So a row of logits lies
// in several matrices, in the order of the classes.
struct RowPieces {
  static constexpr int most = launch::most_pieces;
  int end[most];  // the column behind the piece's last one; of the last piece, a number beyond all columns
  void* begin[most];  // where column 0 of row 0 would be in the piece's matrix
  int64_t stride[most];
};
struct InPiecesArgs : InPlaceArgs {
  RowPieces pieces;
  int columns;  // of all pieces
  const float* others;  // statistics of the classes that are in no piece; nullptr: there are none
};

// The addresses of a row's elements by their column, counted from `first`. Columns must be asked for in ascending order.
template <class T> class WholeRow {
 public:
  LIGER_DEVICE WholeRow(T* row, int first) : begin_(opaque(row + first)) {}
  LIGER_DEVICE T* operator()(int column) const { return begin_ + column; }

 private:
  T* begin_;
};
template <class T> class RowInPieces {
 public:
  LIGER_DEVICE RowInPieces(const RowPieces& pieces, int64_t row, int first) : pieces_(pieces), row_(row), first_(first) { take(0); }
  LIGER_DEVICE T* operator()(int column) {
    while (first_ + column >= end_) take(piece_ + 1);
    return begin_ + column;
  }

 private:
  LIGER_DEVICE void take(int piece) {
    piece_ = piece;
    end_ = pieces_.end[piece];
    begin_ = opaque(static_cast<T*>(pieces_.begin[piece]) + (row_ * pieces_.stride[piece] + first_));
  }

  const RowPieces& pieces_;
  int64_t row_;
  int first_, piece_, end_;
  T* begin_;
};

// K: vectors of a row that a thread holds in registers. Pieces: rows lie in several matrices.
template <class T, int N, int K, bool Pieces = false> struct InPlaceRegisters {
  using Args = std::conditional_t<Pieces, InPiecesArgs, InPlaceArgs>;
  static constexpr int max_threads = launch::in_place_registers.instance(N, K).max_threads, min_blocks = K == 10 ? 3 : 1;

  static LIGER_DEVICE void run(const Args& args) {
    const LogitRows& a = args.rows;
    RowGroupOf<0, true> group(a.threads_per_row);
    const bool first = group.index == 0;
    const int64_t at = group.first_row();
    // A row whose target is ignored need not be loaded. But waiting for the target first costs 1 to 3 % of the row's time, so it is done
    // only if many targets of the batch are ignored.
    bool wanted = at < a.rows;
    if (wanted && a.counts[CrossEntropyCounts::valid] < args.at_once_from) wanted = a.is_class(a.target[at]);
    const auto logits_from = [&](int first) {
      if constexpr (Pieces) return RowInPieces<T>(args.pieces, at, first);
      else return WholeRow<const T>(static_cast<const T*>(a.logits) + at * a.stride, first);
    };
    const auto gradient_from = [&](int first) {
      if constexpr (Pieces) return RowInPieces<T>(args.pieces, at, first);
      else return WholeRow<T>(static_cast<T*>(args.gradient) + at * args.gradient_stride, first);
    };
    const int cols = [&] {
      if constexpr (Pieces) return args.columns;
      else return int(a.vocab);
    }();
    const int whole = cols / N * N;
    const Columns<N, K> columns(group.index, group.threads_per_row, wanted ? whole : 0);
    // Columns past the last one are -inf, which adds nothing to a sum and raises no maximum: so nothing tests for them before the stores.
    Packed<T, N> x[K];
    const Packed<T, N> nothing = same_value(Packed<T, N>{}, minus_infinity());
    auto logits = logits_from(columns.first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      x[k] = nothing;
      if (columns.has(k)) load<Hint::in_place>(x[k], logits(k * columns.step));
    }
    const LogitRow<T, false> row(a, at, first, false);
    const int tail = row.valid && whole + group.index < cols ? whole + group.index : -1;
    Packed<T, 1> last = same_value(Packed<T, 1>{}, minus_infinity());
    if (tail >= 0) load(last, logits_from(tail)(0));
    // The thread that owns the target's column writes the losses, too: it alone overwrites this logit by its gradient.
    const int owner = row.target / N & (group.threads_per_row - 1);
    const bool has_target = row.valid && (row.target < whole ? owner == group.index : row.target == tail);
    T raw_target{};
    if (has_target) raw_target = *logits_from(int(row.target))(0);
    const LossGradients grad(a, args.gradient_scale);

    // For what a row hardly ever needs: loads this thread's vectors from memory again (no other thread writes them), in a loop of few
    // instructions and registers.
    const auto read_again = [&](auto use) {
      auto logits = logits_from(columns.first);
#pragma unroll 1
      for (int k = 0; k < K; ++k) {
        if (!columns.has(k)) continue;
        Packed<T, N> raw;
        load<Hint::in_place>(raw, logits(k * columns.step));
        use(raw, k);
      }
    };

    // Relative to this thread's own maximum, so that the threads of the row exchange values once, not twice.
    RowStatistics<T, false> own;
    own.max = fmaxf(largest(x, [](int) { return true; }), last[0]);
    const Exp<T> exp(own.base());
    own.sum = exp(last[0]);
    if constexpr (!has_pairs && sizeof(T) == 2)
#pragma unroll
      for (int k = 0; k < K; ++k) forget_at_all_costs(x[k].data);
    if (!exp.far()) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        float part = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) part += exp.near(x[k][j]);
        own.sum += part;
      }
    } else {
      read_again([&](const Packed<T, N>& raw, int) {
        for (int j = 0; j < N; ++j) own.sum += exp(raw[j]);
      });
    }
    float merged[2] = {own.max, own.sum * exp.correction(own.base())};
    group.reduce(merged, [](float (&to)[2], const float (&from)[2]) { join_exponentials<bf16>(to, from); });  // of fp32, too: fast
    float target_logit = to_float(raw_target);
    bool writes = row.valid ? has_target : first && row.live;
    if constexpr (Pieces) {
      using Slots = CrossEntropyStatistics;
      if (args.others && row.valid) {
        const auto of = [&](Slots::Slot slot) { return args.others[slot * a.rows + at]; };
        const float others[2] = {of(Slots::maximum), of(Slots::sum)};
        join_exponentials<bf16>(merged, others);
        if (row.target >= cols) {
          target_logit = of(Slots::target);
          writes = first;
        }
      }
    }
    own.max = merged[0];
    own.sum = merged[1];
    const float log_sum = own.log_sum();
    const LogSumExp lse{own.base() + log_sum, 0};
    const float negative_log = own.base() - target_logit + log_sum;
    if (writes) write_losses(a, args.out, row, own, lse, negative_log);
    if (!row.live) return;
    if (!row.valid) {
      const float value = row.ignored ? 0.f : not_a_number();
      const Columns<N, K> all(group.index, group.threads_per_row, whole);
      auto to = gradient_from(all.first);
#pragma unroll 1
      for (int k = 0; k < K; ++k)
        if (all.has(k)) store<Hint::stream>(to(k * all.step), same_value(Packed<T, N>{}, value));
      if (whole + group.index < cols) *gradient_from(whole + group.index)(0) = from_float<T>(value);
      return;
    }

    const RowGradient<T> gradient(a, row, own.base(), 0.f, 1 / own.sum, lse.high, row_token<T>(a, negative_log), grad.ce, grad.z);
#pragma unroll
    for (int k = 0; k < K; ++k) forget_at_all_costs(x[k].data);
    auto to = gradient_from(columns.first);
    const auto share_of = [](const auto& raw, auto share) {
      auto out = raw;
      float g[decltype(out)::elements];
#pragma unroll
      for (int j = 0; j < decltype(out)::elements; ++j) g[j] = share(raw[j]);
      out.set(g);
      return out;
    };
    const auto write = [&](auto share) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (columns.has(k)) store<Hint::stream>(to(k * columns.step), share_of(x[k], share));
      if (tail >= 0) store(gradient_from(tail)(0), share_of(last, share));
    };
    const auto product = [&](float logit) { return gradient.scale * gradient.exp(logit); };
    if constexpr (!Exp<T>::in_one_step) {
      write(product);
    } else if (gradient.scale > 0 && fabsf(gradient.exp.offset) < 1024) {
      // The scale as part of the exponent saves a multiplication per element. Below 1024 an exponent has at least 14 bits behind the point.
      const float exponent = gradient.exp.offset + log2f(gradient.scale);
      write([&](float logit) { return fast_exp2(logit * log2_e + exponent); });
    } else {
      read_again([&](const Packed<T, N>& raw, int k) { store(to(k * columns.step), share_of(raw, product)); });
      if (tail >= 0) store(gradient_from(tail)(0), share_of(last, product));
    }
    if (has_target) *gradient_from(int(row.target))(0) = from_float<T>(gradient.scale * gradient.exp(target_logit) - gradient.hard);
  }
};

std::optional<launch::Launch> launch_in_pieces(const CrossEntropyInPieces& op, Stream stream) {
  const CrossEntropyRows& row = op.row;
  bool vectors = true;
  for (int i = 0; i < op.count; ++i) vectors &= aligned(op.pieces[i].logits, 0);
  const bool plain = !costly_options(row.options) && !row.accuracy && !row.predicted && !row.options.token_scaling;
  return launch::cross_entropy_in_pieces(device_profile(stream.device), logits_shape(row, vectors, !plain), plain, op.count);
}

}  // namespace

void cross_entropy_in_place(const CrossEntropyInPlace& op, Stream stream) {
  const CrossEntropyRows& row = op.row;
  require(op.gradient.dtype == row.logits.dtype, row.op, ": the gradient of the logits must have their dtype");
  const bool vectors = vectors_fit(row) && aligned(op.gradient, 0), full = costly_options(row.options) || row.accuracy || row.predicted;
  if (row.rows == 0 || row.vocab == 0) return;
  const launch::Launch made =
      launch::cross_entropy_in_place(device_profile(stream.device), logits_shape(row, vectors, full), !full && !row.options.token_scaling);
  const InPlaceArgs args{.rows = logit_rows(row, row.vocab, made.plan, stream),
                         .out = row_outputs(row),
                         .gradient_scale = float(op.gradient_scale),
                         .gradient = op.gradient.data,
                         .gradient_stride = op.gradient.stride,
                         .slots = made.plan.k,
                         .shared_offset = made.plan.ring_offset,
                         .at_once_from = float(op.batch_rows) * 15 / 16};
  if (made.of(launch::in_place_kernel))
    return with_logits<launch::in_place_kernel>(
        made, row.logits.dtype, full, [&]<class T, bool Full, Instance I>() { launch<InPlace<T, I.vec, Full>>(made, args, stream); });
  dispatch(row.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_instance<launch::in_place_registers, fits<T>>(made,
                                                       [&]<Instance I>() { launch<InPlaceRegisters<T, I.vec, I.k>>(made, args, stream); });
  });
}

bool cross_entropy_takes_pieces(const CrossEntropyInPieces& op, Stream stream) { return launch_in_pieces(op, stream).has_value(); }

void cross_entropy_in_pieces(const CrossEntropyInPieces& op, Stream stream) {
  const CrossEntropyRows& row = op.row;
  const launch::Launch made = launch_in_pieces(op, stream).value();
  InPiecesArgs args{};
  args.rows = logit_rows(row, op.classes, made.plan, stream);
  args.rows.vocab = op.classes;
  args.out = row_outputs(row);
  args.gradient_scale = float(op.gradient_scale);
  args.at_once_from = float(op.batch_rows) * 15 / 16;
  args.columns = int(row.vocab);
  args.others = static_cast<const float*>(op.others);
  for (int i = 0; i < op.count; ++i) {
    const MutableRows& logits = op.pieces[i].logits;
    args.pieces.end[i] = i + 1 < op.count ? int(op.pieces[i + 1].first) : INT_MAX;
    args.pieces.begin[i] = static_cast<char*>(logits.data) - op.pieces[i].first * size_of(logits.dtype);
    args.pieces.stride[i] = logits.stride;
  }
  dispatch(row.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (sizeof(T) == 2)
      with_instance<launch::in_place_registers, fits<T>>(
          made, [&]<Instance I>() { launch<InPlaceRegisters<T, I.vec, I.k, true>>(made, args, stream); });
  });
}

}  // namespace liger::gpu
