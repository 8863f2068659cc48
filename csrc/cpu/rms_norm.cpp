// RMSNorm on the CPU: bound by memory. The forward reads a row twice: for the sum of squares, and to normalise it. The second pass reads
// the row from L1 or L2 and prefetches the next row, so that memory does not idle meanwhile. The backward reads dy and z twice: for a
// sum over the row, and to compute dz, with the same prefetch. Each block of rows sums dweight in one partial row
// (cpu/partials.h).
#include "cpu/partials.h"
#include "cpu/simd.h"
#include "kernels/norms.h"

namespace liger::cpu::LIGER_ISA {
namespace {

template <class T, class Acc, class W>
[[gnu::flatten]] void forward(const RmsNormForward& a, const In<W> weight, int64_t begin, int64_t end) {
  const bool add = a.residual.data != nullptr, round = a.round_normalized;
  const bool stream_y = streams(a.y, a.rows, a.cols), stream_sum = add && streams(a.sum, a.rows, a.cols);
  const Acc offset = a.weight.data == nullptr ? Acc(0) : Acc(a.offset);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t next = i + 1 < end ? i + 1 : i;
    const auto x = row<T>(a.x, i), next_x = row<T>(a.x, next);
    const auto residual = row<T>(a.residual, i), next_residual = row<T>(a.residual, next);
    const auto sum = row<T>(a.sum, i, stream_sum);
    const auto y = row<T>(a.y, i, stream_y);
    const auto normalised = [&](int64_t j, auto n) {
      const auto v = load<Acc>(x, j, n);
      return add ? round_to<Acc>(sum, v + load<Acc>(residual, j, n)) : v;
    };

    const Acc squares = sum_columns<Acc>(a.cols, [&](int64_t j, auto n) {
      const auto z = normalised(j, n);
      return z * z;
    });
    const Acc rstd = Acc(1) / Math<Acc>::sqrt(squares / Acc(a.cols) + Acc(a.eps));
    static_cast<Acc*>(a.rstd)[i] = rstd;

    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      prefetch(next_x, j);
      if (add) prefetch(next_residual, j);
      const auto z = normalised(j, n);
      if (add) store(sum, j, n, z);
      auto v = z * rstd;
      if (round) v = round_to<Acc>(y, v);
      store(y, j, n, v * (load<Acc>(weight, j, n) + offset));
    });
  }
  if (stream_y || stream_sum) stream_fence();
}

template <class T, class Acc, class W>
[[gnu::flatten]] void backward(const RmsNormBackward& a, const In<W> weight, int64_t begin, int64_t end, Acc* dweight) {
  const bool want_dz = a.dz.data != nullptr, add = a.dsum.data != nullptr;
  const bool stream = want_dz && streams(a.dz, a.rows, a.cols);
  const Acc offset = a.weight.data == nullptr ? Acc(0) : Acc(a.offset);
  if (dweight) columns<Acc>(a.cols, [&](int64_t j, auto n) { store<Acc>(dweight + j, n, vec<Acc>{}); });
  for (int64_t i = begin; i < end; ++i) {
    const int64_t next = i + 1 < end ? i + 1 : i;
    const auto dy = row<T>(a.dy, i), z = row<T>(a.z, i), dsum = row<T>(a.dsum, i);
    const auto next_dy = row<T>(a.dy, next), next_z = row<T>(a.z, next), next_dsum = row<T>(a.dsum, next);
    const auto dz = row<T>(a.dz, i, stream);
    const Acc rstd = static_cast<const Acc*>(a.rstd)[i];

    Acc slope = 0;
    if (want_dz) {
      const Acc dot = sum_columns<Acc>(
          a.cols, [&](int64_t j, auto n) { return load<Acc>(dy, j, n) * (load<Acc>(weight, j, n) + offset) * load<Acc>(z, j, n); });
      slope = rstd * rstd * rstd * (dot / Acc(a.cols));
    }
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      prefetch(next_dy, j);
      prefetch(next_z, j);
      const auto d = load<Acc>(dy, j, n), v = load<Acc>(z, j, n);
      if (dweight) store<Acc>(dweight + j, n, load<Acc>(dweight + j, n) + d * (v * rstd));
      if (want_dz) {
        auto out = d * (load<Acc>(weight, j, n) + offset) * rstd - v * slope;
        if (add) {
          prefetch(next_dsum, j);
          out = out + load<Acc>(dsum, j, n);
        }
        store(dz, j, n, out);
      }
    });
  }
  if (stream) stream_fence();
}

}  // namespace

template <> void run(const RmsNormForward& a, int64_t begin, int64_t end) {
  const bool add = a.residual.data != nullptr;
  const Dtype y = a.y.dtype;
  dispatch_same({y, a.x.dtype, add ? a.residual.dtype : y, add ? a.sum.dtype : y}, [&](auto t, auto acc) {
    using T = decltype(t);
    using Acc = decltype(acc);
    with_param<T>(a.weight, 1, [&](auto weight) { forward<T, Acc>(a, weight, begin, end); });
  });
}

// Items are blocks of rows.
template <> void run(const RmsNormBackward& a, int64_t begin, int64_t end) {
  const Dtype z = a.z.dtype;
  dispatch_same({z, a.dy.dtype, a.dsum.data ? a.dsum.dtype : z, a.dz.data ? a.dz.dtype : z}, [&](auto t, auto acc) {
    using T = decltype(t);
    using Acc = decltype(acc);
    const int64_t block_rows = rows_per_block(a.rows, a.cols);
    with_param<T>(a.weight, 1, [&](auto weight) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * block_rows, last = first + block_rows < a.rows ? first + block_rows : a.rows;
        Acc* const dweight = a.dweight.data ? static_cast<Acc*>(a.workspace) + block * a.cols : nullptr;
        backward<T, Acc>(a, weight, first, last, dweight);
      }
    });
  });
}

}  // namespace liger::cpu::LIGER_ISA
