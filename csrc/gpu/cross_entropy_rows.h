// Device code of the cross entropy kernels: a row and its target (LogitRow), the columns that a thread owns (RowWalk), the online
// statistics of a row (RowStatistics), and its gradient (RowGradient). kernels/cross_entropy.h has the formulas and the names.
#pragma once
#include "gpu/logit_rows.h"
#include "gpu/online_softmax.h"

namespace liger::gpu {

template <class T, int N> LIGER_DEVICE void widen(float (&out)[N], const Packed<T, N>& in) {
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = in[j];
}

// Records the first target that is out of range, and ignores later ones. The host reads the complete record (state 2) in a later op.
LIGER_DEVICE void report_bad_target(const TargetReport& report, int64_t row, int64_t target, int64_t vocab) {
  TargetRecord* record = report.record;
  if (record == nullptr || atomic_claim(&record->state) != 0) return;
  record->device = report.device;
  record->row = row;
  record->target = target;
  record->vocab = vocab;
  struct Name {
    uint32_t words[sizeof(report.op) / 4];
  };
  const Name name = bit_cast<Name>(report.op);
  for (int i = 0; i < int(sizeof(report.op) / 4); ++i) reinterpret_cast<uint32_t*>(record->op)[i] = name.words[i];
  publish_to_host();
  record->state = 2;
  publish_to_host();
}

// One row and its target. Rows past the end, ignored rows and rows with a bad target are not valid: no result depends on their logits.
// LogProbs, here and below: with temperatures, a logit_scale, moments or a gradient of the entropy. It is a template argument because the
// instructions and registers for these would slow down every other loss.
template <class T, bool Full, bool LogProbs = false> struct LogitRow {
  int64_t row;
  int target = 0;
  bool live, ignored = false, valid = false;
  float target_weight = 1;
  const T* data;

  // reports: true in the one thread of the row that reports a bad target. reads_logit: load the target's logit.
  LIGER_DEVICE LogitRow(const LogitRows& a, int64_t row, bool reports, bool reads_logit)
      : LogitRow(a, row, row < a.rows ? a.target[row] : 0, reports, reads_logit) {}
  LIGER_DEVICE LogitRow(const LogitRows& a, int64_t row, int64_t wanted, bool reports, bool reads_logit) : row(row), live(row < a.rows) {
    data = opaque(static_cast<const T*>(a.logits) + row * a.stride);
    if (!live) return;
    ignored = wanted == a.ignore_index;
    valid = a.is_class(wanted);
    if (valid) {
      target = int(wanted);
      if (reads_logit) raw_logit = data[target];
      if (a.class_weight.data) target_weight = load_one(a.class_weight.data, a.class_weight.dtype, target);
    } else if (!ignored && reports) {
      report_bad_target(a.report, a.first_row + row, wanted, a.vocab);
    }
  }
  // For a chunk of the vocabulary: the range `classes`. `target` becomes a column of the chunk; it lies outside of the chunk's
  // columns if the chunk lacks the class (here() is false). Then the logit of column 0 is loaded instead, as an anchor.
  LIGER_DEVICE LogitRow(const LogitRows& a, const Classes& classes, int64_t row, bool reports, bool reads_logit)
      : row(row), live(row < a.rows) {
    data = opaque(static_cast<const T*>(a.logits) + row * a.stride);
    if (!live) return;
    const int64_t wanted = a.target[row];
    ignored = wanted == a.ignore_index;
    valid = !ignored && wanted >= 0 && wanted < classes.all;
    if (valid) {
      target = int(wanted - classes.first);
      if (reads_logit) raw_logit = data[here(a) ? target : 0];
      if (a.class_weight.data) target_weight = load_one(a.class_weight.data, a.class_weight.dtype, target);
    } else if (!ignored && reports) {
      report_bad_target(a.report, a.first_row + row, wanted, classes.all);
    }
  }
  LIGER_DEVICE bool here(const LogitRows& a) const { return target >= 0 && target < a.vocab; }

  LIGER_DEVICE float target_logit(const LogitRows& a) const {
    float logit[1] = {to_float(raw_logit)};
    if constexpr (LogProbs) transform<T>(a, logit, over_temperature(a));
    else if (Full && a.softcap != 0) cap<T>(a, logit);
    return logit[0];
  }
  LIGER_DEVICE float over_temperature(const LogitRows& a) const { return LogProbs && live && a.temperature ? 1 / a.temperature[row] : 1.f; }
  // Label smoothing sums logits relative to the target's logit if that is finite, and relative to 0 otherwise.
  LIGER_DEVICE float anchor(const LogitRows& a) const {
    if (!Full || a.class_share == 0) return 0;
    const float logit = target_logit(a);
    return fabsf(logit) < __builtin_inff() ? logit : 0;
  }

 private:
  // Not converted at the load: the thread waits for the load at the first conversion, which mostly comes after the loop over the row.
  T raw_logit = {};
};

// The columns of a row that one thread owns. The thread's slot i is vector `index + i * threads` of the row's whole vectors (RowParts). A
// thread reads and writes only its own columns, so no barrier is needed between two passes over a row. Threads may have different numbers
// of slots, so walk() and the functions passed to it must not contain collectives.
template <class T, int N> struct RowWalk : RowParts<N> {
  int index, threads;
  using RowParts<N>::head, RowParts<N>::vectors, RowParts<N>::single;

  template <class Group>
  LIGER_DEVICE RowWalk(int64_t vocab, const Group& group, int head = 0)
      : RowParts<N>(vocab, head, group.index), index(group.index), threads(group.threads_per_row) {}
  LIGER_DEVICE int slots() const { return (vectors + threads - 1) / threads; }

  // Processes the slots from `begin` to `end`, K at a time: fetches the next K vectors before it uses the current K, so that the thread
  // always has loads in flight. Calls fetch(vector, slot, column) and use(vector, slot, column). Vectors: a Packed, or a struct with one
  // for each of several tensors.
  template <int K, class Vectors = Packed<T, N>, class Fetch, class Use>
  LIGER_DEVICE void walk(int begin, int end, Fetch fetch, Use use) const {
    const int last = end * threads < vectors ? end * threads : vectors;
    Vectors next[K];
    const auto fetch_batch = [&](int slot, int v) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (v + k * threads < last) fetch(next[k], slot + k, head + (v + k * threads) * N);
    };
    int v = index + begin * threads;
    fetch_batch(begin, v);
    for (int slot = begin; v < last; slot += K, v += K * threads) {
      Vectors raw[K];
#pragma unroll
      for (int k = 0; k < K; ++k) raw[k] = next[k];
      fetch_batch(slot + K, v + K * threads);
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (v + k * threads < last) use(raw[k], slot + k, head + (v + k * threads) * N);
    }
  }
  template <int K, class Vectors = Packed<T, N>, class Fetch, class Use> LIGER_DEVICE void walk(Fetch fetch, Use use) const {
    walk<K, Vectors>(0, slots(), fetch, use);
  }
  // Sets every column of `out` that this thread owns to `value`.
  LIGER_DEVICE void fill(T* out, float value) const {
    const Packed<T, N> same = same_value(Packed<T, N>{}, value);
    for (int v = index; v < vectors; v += threads) store<Hint::stream>(out + (head + int64_t{v} * N), same);
    if (single >= 0) out[single] = from_float<T>(value);
  }
};

// The statistics of a row: max, and the sum of exp(x' - max), in one pass. A logit replaces the maximum only if the logit is larger by more
// than `slack`: terms of the sum may be as large as exp(slack), and after the first vectors the sum is hardly ever rescaled. (For fp32 the
// slack is small, because the difference of a logit and a maximum far below it would be rounded.) base() avoids the difference -inf - -inf;
// NaN and +inf reach the sum as NaN. `rounded_off` collects the rounding errors of an fp32 row's additions, and is seldom added to the sum.
// Full: also the sum of w[j] * (x'[j] - anchor), where the anchor keeps sums of large logits from overflowing, and the first of the largest
// logits (or the first NaN, as torch.argmax). Before merge() the sum lacks Exp's correction() for its base.
template <class T, bool Full, bool LogProbs = false> struct RowStatistics : Exponentials {
  static constexpr float slack = sizeof(T) == 2 ? 16 : 2;
  float rounded_off = 0, weighted = 0, best = minus_infinity();
  float moment = 0, squares = 0, total = 0;  // sums of exp(x' - max) * (x' - max), exp(x' - max)^2 and x'
  int best_column = 0;
  const float anchor, over_temperature;
  LIGER_DEVICE explicit RowStatistics(float anchor = 0, float over_temperature = 1) : anchor(anchor), over_temperature(over_temperature) {}

  // Ascending: all earlier calls had smaller columns. The thread's single element comes last, but may lie before its vectors.
  template <int N, bool Ascending = (N > 1)> LIGER_DEVICE void add(const LogitRows& a, float (&x)[N], int column, bool want_best) {
    const bool earlier = !Ascending && column < best_column;
    if constexpr (Full) {
      if (want_best) {
        const float found = largest_element(x);
        if (found > best || (earlier && found == best)) take_best(x, column, [&](float value) { return value == found; });
      }
      if constexpr (LogProbs) transform<T>(a, x, over_temperature);
      else if (a.softcap != 0) cap<T>(a, x);
      if (a.class_share != 0) {
        float w[N];
        class_weights(a, w, column);
#pragma unroll
        for (int j = 0; j < N; ++j) weighted += w[j] * (x[j] - anchor);
      }
    }
    const float top = largest_element(x);
    if (top > max + slack) {
      sum += rounded_off;
      rounded_off = 0;
      const float before = sum;
      sum *= Exp<T>(base()).correction(base()) * exp_as<T>(max - top);
      const float distance = max - top;
      max = top;
      sum *= 1 / Exp<T>(top).correction(top);
      if constexpr (LogProbs) move_moments(distance, before != 0 ? sum / before : 0.f, before);
    }
    const Exp<T> exp(base());
    float part = 0;
    if (LogProbs && a.moments) {
      add_moments(exp, x, part);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) part += exp(x[j]);
    }
    if constexpr (Full)
      if (want_best && part != part && (best == best || earlier)) take_best(x, column, [](float value) { return value != value; });
    const float total = sum + part;
    if constexpr (sizeof(T) == 4) rounded_off += part - (total - sum);
    sum = total;
  }

  // Aligned: the weights' vectors are aligned as Vec requires.
  template <bool Aligned = false, int N> LIGER_DEVICE static void class_weights(const LogitRows& a, float (&w)[N], int column) {
    if (a.class_weight.data) {
      with_dtype(a.class_weight.dtype, [&](auto tag) {
        using W = std::remove_cvref_t<decltype(tag)>;
        const W* const from = static_cast<const W*>(a.class_weight.data) + column;
        Vec<W, N> v;
        if (Aligned || reinterpret_cast<uintptr_t>(from) % alignof(Vec<W, N>) == 0) {
          load(v, from);
        } else {  // the vectors follow the alignment of the logits
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] = from[j];
        }
#pragma unroll
        for (int j = 0; j < N; ++j) w[j] = to_float(v[j]);
      });
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = 1;
    }
  }

  // Merges the moments of a row's threads, after merge().
  template <class Group> LIGER_DEVICE void merge_moments(Group& group) {
    float sums[2] = {moment, squares}, totals[2] = {total, 0};
    group.sum(sums);
    group.sum(totals);
    moment = sums[0], squares = sums[1], total = totals[0];
  }
  // Merges the statistics of a row's threads into all of these threads. All reductions have the same number of values, as RowGroup
  // requires.
  template <class Group> LIGER_DEVICE void merge(Group& group) {
    const float correction = Exp<T>(base()).correction(base());
    sum = (sum + rounded_off) * correction;
    if constexpr (LogProbs) moment *= correction, squares *= correction * correction;
    if constexpr (Full) {
      float tops[2] = {max, best};
      group.reduce(tops, [](float (&a)[2], const float (&b)[2]) {
        for (int i = 0; i < 2; ++i) a[i] = max_nan(a[i], b[i]);
      });
      float columns[2] = {bit_cast<float>(best == tops[1] || best != best ? best_column : INT_MAX), 0};
      group.reduce(columns, [](float (&a)[2], const float (&b)[2]) { a[0] = bit_cast<int>(a[0]) < bit_cast<int>(b[0]) ? a[0] : b[0]; });
      best_column = bit_cast<int>(columns[0]);
      best = tops[1];
      if constexpr (LogProbs) move_moments(max - tops[0], exp_as<T>(max == tops[0] ? 0 : max - tops[0]), sum);
      rescale<T>(tops[0]);
      float sums[2] = {sum, weighted};
      group.sum(sums);
      sum = sums[0], weighted = sums[1];
    } else {
      rescale<T>(group.max(max));
      sum = group.sum(sum);
    }
  }

 private:
  // Adds the moments of x, and their sum of exponentials to `part`. For 16-bit logits the exponents of 2 serve as distances from the base;
  // the last line converts their unit and subtracts the base's own exponent, which rounding leaves near 0. The bound makes the term of -inf
  // 0.
  template <int N> LIGER_DEVICE void add_moments(const Exp<T>& exp, const float (&x)[N], float& part) {
    float part_moment = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float distance = Exp<T>::in_one_step ? exp.exponent(x[j]) : x[j] - base(), e = exp(x[j]);
      part += e;
      part_moment += e * fmaxf(distance, -1000.f);
      squares += e * e;
      total += x[j];
    }
    moment += Exp<T>::in_one_step ? ln_2 * (part_moment - exp.exponent(base()) * part) : part_moment;
  }
  // Makes the moments relative to another maximum. before: the sum before its multiplication by the factor.
  LIGER_DEVICE void move_moments(float distance, float factor, float before) {
    moment = before != 0 ? factor * (moment + distance * before) : 0.f;
    squares *= factor * factor;
  }
  template <int N> LIGER_DEVICE static float largest_element(const float (&x)[N]) {
    float largest = x[0];
#pragma unroll
    for (int j = 1; j < N; ++j) largest = fmaxf(largest, x[j]);
    return largest;
  }
  // Stores the first element for which is_best, for vectors with a new best logit, which are few.
  template <int N, class F> LIGER_DEVICE void take_best(const float (&x)[N], int column, F is_best) {
#pragma unroll
    for (int j = N - 1; j >= 0; --j)
      if (is_best(x[j])) best = x[j], best_column = column + j;
  }
};

// The upstream gradients of a row's two losses. The constructor without `grad` makes them relative to counts[scale], which is ce_scale, or
// z_scale if class weights make ce_scale 0. Construct it before the row arrives: it reads memory.
struct LossGradients {
  float ce, z = 0;

  LIGER_DEVICE LossGradients(const LogitRows& a, float gradient_scale) : ce(gradient_scale) {
    if (a.lse_square_scale == 0) return;
    const float ce_scale = a.counts[CrossEntropyCounts::ce_scale];
    z = ce_scale == 0 ? ce : ce * (a.counts[CrossEntropyCounts::z_scale] / ce_scale);
    if (ce_scale == 0) ce = 0;
  }
  // From the upstream gradient of the loss: one number (mean or sum), or one per row.
  LIGER_DEVICE LossGradients(const LogitRows& a, const Rows& grad, int64_t row) {
    const float g = load_one(grad.data, grad.dtype, row * grad.stride);
    ce = g * a.counts[CrossEntropyCounts::ce_scale];
    z = g * a.counts[CrossEntropyCounts::z_scale];
  }
};

// A row's gradient: dx[j] = (scale * exp(x'[j] - base) - hard * [j == target] - soft * w[j]) * dx'[j] / dx[j].
template <class T, bool LogProbs = false> struct RowGradient {
  Exp<T> exp;  // exp(x' - base)
  float scale, hard, soft, over_temperature, inverse_cap, entropy = 0, lse, inverse_stored_factor = 0;

  // token: the factor of token scaling; ce and z: the upstream gradients of the row's two losses; over_sum = p / exp(x' - base); low: the
  // rounding error of the base.
  template <bool Full>
  LIGER_DEVICE RowGradient(const LogitRows& a, const LogitRow<T, Full, LogProbs>& row, float base, float low, float over_sum, float lse,
                           float token, float ce, float z)
      : exp(base, low), over_temperature(row.over_temperature(a)), lse(lse) {
    inverse_cap = LogProbs && a.scales() ? 1 / (a.softcap * over_temperature) : a.inverse_softcap;
    hard = token * ce * a.hard_share * row.target_weight;
    soft = token * ce * a.class_share;
    scale = hard;
    if (soft != 0) scale += soft * a.counts[CrossEntropyCounts::weight];
    if (a.lse_square_scale != 0) scale += token * z * 2 * a.lse_square_scale * lse;
    scale *= over_sum * exp.correction(base);
  }

  // Includes the gradient of the entropy, so that compute() returns factor * (p[j] * (mix[0] + mix[1] * log(p[j])) - mix[2] * [j ==
  // target]) * dx'[j] / dx[j]. The base must be lse. stored: compute() reads factor * (p[j] - [j == target]) instead of logits.
  LIGER_DEVICE void take(const float* mix, float factor, bool stored) {
    const float exp_scale = stored ? factor : factor * exp.correction(lse);
    if (stored) inverse_stored_factor = 1 / factor, lse = mix[3];
    scale = mix[0] * exp_scale, entropy = mix[1] * exp_scale, hard = mix[2] * factor, soft = 0;
  }

  template <bool Full, int N> LIGER_DEVICE Packed<T, N> compute(const LogitRows& a, const Packed<T, N>& raw, int column, int target) const {
    float x[N], g[N];
    widen(x, raw);
    if constexpr (LogProbs) {
      if (inverse_stored_factor != 0) return from_stored(x, column, target);
      transform<T>(a, x, over_temperature);
    } else if (Full && a.softcap != 0) {
      cap<T>(a, x);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) g[j] = scale * exp(x[j]);
    if constexpr (LogProbs)
      if (entropy != 0) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (const float e = exp(x[j]); e > 0) g[j] += entropy * e * (x[j] - lse);
      }
    if (target >= column && target < column + N) {
#pragma unroll
      for (int j = 0; j < N; ++j) g[j] -= column + j == target ? hard : 0.f;
    }
    if constexpr (Full) {
      if (soft != 0) {
        float w[N];
        RowStatistics<T, true>::class_weights(a, w, column);
#pragma unroll
        for (int j = 0; j < N; ++j) g[j] -= soft * w[j];
      }
      if (a.softcap != 0) {
#pragma unroll
        for (int j = 0; j < N; ++j) g[j] *= capped_slope(x[j] * inverse_cap);
      }
    }
    Packed<T, N> out;
    out.set(g);
    return out;
  }

 private:
  // Here the member lse is the log-probability of the target.
  template <int N> LIGER_DEVICE Packed<T, N> from_stored(float (&x)[N], int column, int target) const {
    constexpr float least = 0x1p-126f;  // makes the logarithm of a probability of 0 finite
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float p = x[j] * inverse_stored_factor, bounded = fmaxf(p, least);
      x[j] = p * (scale + entropy * (sizeof(T) == 2 ? ln_2 * fast_log2(bounded) : logf(bounded)));
    }
    if (target >= column && target < column + N) {
      const float target_gradient = expf(lse) * (scale + entropy * fmaxf(lse, logf(least))) - hard;
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = column + j == target ? target_gradient : x[j];
    }
    Packed<T, N> out;
    out.set(x);
    return out;
  }
};

}  // namespace liger::gpu
