// The generalised Jensen-Shannon divergence of a student from a teacher, by rows of log-probabilities of both. The forward stores each
// row's divergence, which is a sum over columns; the backward stores the gradient of the student's log-probabilities. kernels/jsd.h has the
// formulas.
//
// Memory bandwidth bounds both kernels, with instructions close behind: for 0 < beta < 1 each element takes three exponentials or
// logarithms. Between forward and backward only the inputs and a few counts are saved. A tensor of terms, as large as an input, would take
// longer to write and read than the backward takes to compute the terms again.
//
// Forward: reads the student's and the teacher's rows once. A thread group of at most one block processes a row in vectors of 16 bytes.
// Backward: reads both again and writes the gradient, in tiles (tiles.h). A tile is a part of one row, or of each of several short rows,
// and successive blocks process successive tiles.
//
// Rows may begin at any address, as in cross_entropy.cu: the elements before the first aligned vector and behind the last whole vector are
// accessed singly. Vectors are possible only if the rows of student, teacher and (in the backward) gradient have the same offset modulo
// 16 bytes; otherwise every element is accessed singly. cross_entropy_reduce.cu computes the mean of the rows' divergences.
#include "kernels/jsd.h"

#include <initializer_list>

#include "gpu/cross_entropy_launch.h"
#include "gpu/tiles.h"
#include "launch/jsd.h"
#include "math/jsd.h"

namespace liger::gpu {
namespace {

using math::Divergence;

template <class T> struct JsdMath {
  using scalar = float;
  static LIGER_DEVICE float exp(float v) { return exp_as<T>(v); }
  static LIGER_DEVICE float log(float v) {
    if constexpr (sizeof(T) == 2) return fast_log2(v) * 0.6931472f;
    else return logf(v);
  }
  static LIGER_DEVICE float log_mixture(float m, float rest, float c, float t, float e) {
    if constexpr (sizeof(T) == 2) return math::short_log_mixture<JsdMath>(m, rest, c, t);
    else return math::log_mixture<JsdMath>(m, c, t, e);
  }
};

struct JsdArgs {
  JsdRows in;
  math::JsdWeights<float> weights;
  Divergence divergence;
  int threads_per_row;

  // Calls f with the divergence as a template argument, so that there is one branch per vector and none per element.
  template <class F> LIGER_DEVICE void with_divergence(F f) const {
    if (divergence == Divergence::mixture) f.template operator()<Divergence::mixture>();
    else if (divergence == Divergence::forward_kl) f.template operator()<Divergence::forward_kl>();
    else f.template operator()<Divergence::reverse_kl>();
  }
  LIGER_DEVICE bool counts(int64_t row) const { return in.labels == nullptr || in.labels[row] != in.ignore_index; }
};

template <class T> LIGER_DEVICE const T* row_data(const Rows& rows, int64_t row) {
  return opaque(static_cast<const T*>(rows.data) + row * rows.stride);
}

template <class T, int N> struct Pair {
  Packed<T, N> x, y;
};

template <class T, int N> struct JsdForwardKernel {
  struct Args {
    JsdArgs jsd;
    float *losses, *counts;
  };
  static constexpr int max_threads = launch::jsd_forward_kernel.instance(N).max_threads, min_blocks = 2;

  static LIGER_DEVICE void run(const Args& args) {
    const JsdArgs& a = args.jsd;
    let_next_kernel_start();
    RowGroup group(a.threads_per_row);
    const int64_t row = group.first_row();
    const bool live = row < a.in.rows, counts = live && a.counts(row);
    const T* const x = row_data<T>(a.in.log_q, row);
    const T* const y = row_data<T>(a.in.log_p, row);
    const RowWalk<T, N> columns(counts ? a.in.vocab : 0, group, counts ? unaligned_head<N>(x, a.in.vocab) : 0);
    float sum = 0;
    const auto add = [&]<int M>(const Pair<T, M>& pair) {
      a.with_divergence([&]<Divergence D>() {
        float part = 0;
#pragma unroll
        for (int i = 0; i < M; ++i) part += math::jsd_term<JsdMath<T>, D>(pair.x[i], pair.y[i], a.weights);
        sum += part;
      });
    };
    columns.template walk<launch::jsd_in_flight, Pair<T, N>>(
        [&](auto& pair, int, int column) {
          load<Hint::stream>(pair.x, x + column);
          load<Hint::stream>(pair.y, y + column);
        },
        [&](const auto& pair, int, int) { add(pair); });
    if (columns.single >= 0) {
      Pair<T, 1> one;
      load(one.x, x + columns.single);
      load(one.y, y + columns.single);
      add(one);
    }
    sum = group.sum(sum);
    if (group.index == 0 && live) args.losses[row] = sum;
    if (a.in.labels == nullptr && block_id() == 0 && thread_id() == 0) count_all(args.counts, a.in.rows);
  }
  // Stores the counts of a call without labels: every row counts. With labels, CountTargets (cross_entropy_reduce.cu) computes them.
  static LIGER_DEVICE void count_all(float* counts, int64_t rows) {
    using Counts = CrossEntropyCounts;
    counts[Counts::valid] = counts[Counts::target_weight] = float(rows);
    counts[Counts::weight] = 0;
    counts[Counts::ce_scale] = counts[Counts::z_scale] = counts[Counts::scale] = float(1 / double(rows));
  }
};

template <class T, int N> struct JsdBackwardKernel {
  struct Args {
    Tiles tiles;
    JsdArgs jsd;
    const float* counts;
    Vector grad;
    MutableRows dlog_q;
  };
  static constexpr int max_threads = launch::jsd_backward_kernel.instance(N).max_threads, K = launch::jsd_tile_k;

  static LIGER_DEVICE void run(const Args& args) {
    const JsdArgs& a = args.jsd;
    const Tile<N, K> tile(args.tiles);
    if (!tile.live()) return;
    const T* const x = row_data<T>(a.in.log_q, tile.row);
    const RowTile<N, K> part = tile.part(unaligned_head<N>(x, a.in.vocab));
    T* const out = opaque(static_cast<T*>(args.dlog_q.data) + tile.row * args.dlog_q.stride);
    TileValues<T, N, K> student, teacher;
    if (!a.counts(tile.row)) {
      part.for_each([&](auto& zeros, int64_t column) { store<Hint::stream>(out + column, zeros = same_value(zeros, 0.f)); }, student);
      return;
    }
    part.template load<Hint::stream>(student, x);
    part.template load<Hint::stream>(teacher, row_data<T>(a.in.log_p, tile.row));
    const float scale = load_one(args.grad.data, args.grad.dtype, 0) * args.counts[CrossEntropyCounts::ce_scale];
    part.for_each(
        [&]<int M>(Packed<T, M>& student_values, const Packed<T, M>& teacher_values, int64_t column) {
          a.with_divergence([&]<Divergence D>() {
            float g[M];
#pragma unroll
            for (int i = 0; i < M; ++i) g[i] = scale * math::jsd_slope<JsdMath<T>, D>(student_values[i], teacher_values[i], a.weights);
            student_values.set(g);
          });
          store<Hint::stream>(out + column, student_values);
        },
        student, teacher);
  }
};

JsdArgs jsd_arguments(const JsdRows& in, const launch::LaunchPlan& plan) {
  return {in, math::JsdWeights<float>(in.beta), math::divergence_kind(in.beta), plan.threads_per_row};
}

}  // namespace

void jsd_forward(const JsdForward& op, Stream stream) {
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  dispatch(op.in.log_q.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_instance<launch::jsd_forward_kernel, fits<T>>(config, [&]<Instance I>() {
      launch<JsdForwardKernel<T, I.vec>>(
          config, {jsd_arguments(op.in, config.plan), static_cast<float*>(op.losses), static_cast<float*>(op.counts)}, stream);
    });
  });
}

void jsd_backward(const JsdBackward& op, Stream stream) {
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  dispatch(op.in.log_q.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_instance<launch::jsd_backward_kernel, fits<T>>(config, [&]<Instance I>() {
      launch<JsdBackwardKernel<T, I.vec>>(
          config, {Tiles(config), jsd_arguments(op.in, config.plan), static_cast<const float*>(op.counts), op.grad, op.dlog_q}, stream);
    });
  });
}

}  // namespace liger::gpu
