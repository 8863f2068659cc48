// LayerNorm on the CPU: bound by memory. The forward has three passes over a row: the mean, the sum of (x - mean)^2, and y. Subtracting the
// mean before squaring avoids cancellation if the mean is large. The second and third pass read the row from L1 or L2; the third prefetches
// the next row. The backward reads dy and z twice: for the sums over the row, and to compute dz. Each block of rows sums dweight and
// dbias in two partial rows (cpu/partials.h).
#include "cpu/partials.h"
#include "cpu/simd.h"
#include "kernels/norms.h"

namespace liger::cpu::LIGER_ISA {
namespace {

template <class T, class Acc, class W>
[[gnu::flatten]] void forward(const LayerNormForward& a, const In<W> weight, int64_t begin, int64_t end) {
  const bool stream = streams(a.y, a.rows, a.cols), has_bias = a.bias.data != nullptr;
  const auto bias = param<any>(a.bias);
  const auto bias_same = param<T>(a.bias);
  const bool same = a.bias.dtype == dtype_constant<T>;
  for (int64_t i = begin; i < end; ++i) {
    const auto x = row<T>(a.x, i), next_x = row<T>(a.x, i + 1 < end ? i + 1 : i);
    const auto y = row<T>(a.y, i, stream);
    const Acc mean = sum_columns<Acc>(a.cols, [&](int64_t j, auto n) { return load<Acc>(x, j, n); }) / Acc(a.cols);
    const Acc squares = sum_columns<Acc>(a.cols, [&](int64_t j, auto n) {
      const auto v = load<Acc>(x, j, n) - mean;
      return v * v;
    });
    const Acc rstd = Acc(1) / Math<Acc>::sqrt(squares / Acc(a.cols) + Acc(a.eps));
    static_cast<Acc*>(a.mean)[i] = mean;
    static_cast<Acc*>(a.rstd)[i] = rstd;
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      prefetch(next_x, j);
      auto v = (load<Acc>(x, j, n) - mean) * rstd * load<Acc>(weight, j, n);
      if (has_bias) v = v + (same ? load<Acc>(bias_same, j, n) : load<Acc>(bias, j, n));
      store(y, j, n, v);
    });
  }
  if (stream) stream_fence();
}

// dweight and dbias: this block's partial rows, or nullptr.
template <class T, class Acc, class W>
[[gnu::flatten]] void backward(const LayerNormBackward& a, const In<W> weight, int64_t begin, int64_t end, Acc* dweight, Acc* dbias) {
  const bool want_dz = a.dz.data != nullptr, stream = want_dz && streams(a.dz, a.rows, a.cols);
  Acc* const block_sums[] = {dweight, dbias};
  for (Acc* const partial : block_sums)
    if (partial) columns<Acc>(a.cols, [&](int64_t j, auto n) { store<Acc>(partial + j, n, vec<Acc>{}); });
  for (int64_t i = begin; i < end; ++i) {
    const int64_t next = i + 1 < end ? i + 1 : i;
    const auto dy = row<T>(a.dy, i), z = row<T>(a.z, i), next_dy = row<T>(a.dy, next), next_z = row<T>(a.z, next);
    const auto dz = row<T>(a.dz, i, stream);
    const Acc mean = static_cast<const Acc*>(a.mean)[i], rstd = static_cast<const Acc*>(a.rstd)[i];

    Acc g_mean = 0, gn_mean = 0;
    if (want_dz) {
      const auto sums = sum_columns<Acc, 2>(a.cols, [&](int64_t j, auto n, vec<Acc>(&terms)[2]) {
        terms[0] = load<Acc>(dy, j, n) * load<Acc>(weight, j, n);
        terms[1] = terms[0] * (load<Acc>(z, j, n) - mean);
      });
      g_mean = sums[0] / Acc(a.cols);
      gn_mean = sums[1] * rstd / Acc(a.cols);
    }
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      prefetch(next_dy, j);
      prefetch(next_z, j);
      const auto d = load<Acc>(dy, j, n), normalised = (load<Acc>(z, j, n) - mean) * rstd;
      if (dweight) store<Acc>(dweight + j, n, load<Acc>(dweight + j, n) + d * normalised);
      if (dbias) store<Acc>(dbias + j, n, load<Acc>(dbias + j, n) + d);
      if (want_dz) store(dz, j, n, rstd * (d * load<Acc>(weight, j, n) - g_mean - normalised * gn_mean));
    });
  }
  if (stream) stream_fence();
}

}  // namespace

template <> void run(const LayerNormForward& a, int64_t begin, int64_t end) {
  dispatch_same({a.x.dtype, a.y.dtype}, [&](auto t, auto acc) {
    using T = decltype(t);
    using Acc = decltype(acc);
    with_param<T>(a.weight, 1, [&](auto weight) { forward<T, Acc>(a, weight, begin, end); });
  });
}

// Items are blocks of rows; a block's partial rows are dweight's, then dbias's.
template <> void run(const LayerNormBackward& a, int64_t begin, int64_t end) {
  const Dtype z = a.z.dtype;
  dispatch_same({z, a.dy.dtype, a.dz.data ? a.dz.dtype : z}, [&](auto t, auto acc) {
    using T = decltype(t);
    using Acc = decltype(acc);
    const int64_t block_rows = rows_per_block(a.rows, a.cols);
    with_param<T>(a.weight, 1, [&](auto weight) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * block_rows, last = first + block_rows < a.rows ? first + block_rows : a.rows;
        Acc* const partials = a.workspace ? static_cast<Acc*>(a.workspace) + block * 2 * a.cols : nullptr;
        backward<T, Acc>(a, weight, first, last, a.dweight.data ? partials : nullptr, a.dbias.data ? partials + a.cols : nullptr);
      }
    });
  });
}

}  // namespace liger::cpu::LIGER_ISA
