// GroupNorm on the CPU: bound by memory. An item (cpu/dispatch.h) is a group of one sample; its channels are contiguous. The forward
// has three passes over a group: the mean, the sum of (x - mean)^2, and y. Each channel has one weight and one bias. The backward sums dy
// and dy * (x - mean) over each channel; these sums, times the weights, add up to the sums of the group. Each sample has a partial row of
// dweight and dbias.
#include "kernels/group_norm.h"

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

// One element, of a dtype known at run time.
template <class Acc> LIGER_INLINE Acc value(const In<any>& in, int64_t at) { return load<Acc>(in, at, Part{1})[0]; }
template <class Acc> LIGER_INLINE Acc channel_value(const Vector& parameter, int64_t channel, Acc missing) {
  return parameter.data ? value<Acc>(param<any>(parameter), channel) : missing;
}

template <class T, class Acc> [[gnu::flatten]] void forward(const GroupNormForward& a, int64_t begin, int64_t end) {
  const GroupNormShape& shape = a.shape;
  const int64_t cols = shape.cols();
  const bool stream = streams(a.y, shape.rows(), cols);
  for (int64_t i = begin; i < end; ++i) {
    const auto x = row<T>(a.x, i);
    const auto y = row<T>(a.y, i, stream && shape.channel % lanes<Acc> == 0);
    const Acc mean = sum_columns<Acc>(cols, [&](int64_t j, auto n) { return load<Acc>(x, j, n); }) / Acc(cols);
    const Acc squares = sum_columns<Acc>(cols, [&](int64_t j, auto n) {
      const auto v = load<Acc>(x, j, n) - mean;
      return v * v;
    });
    const Acc rstd = Acc(1) / Math<Acc>::sqrt(squares / Acc(cols) + Acc(a.eps));
    static_cast<Acc*>(a.mean)[i] = mean;
    static_cast<Acc*>(a.rstd)[i] = rstd;
    const int64_t first = i % shape.groups * shape.channels;
    for (int64_t c = 0; c < shape.channels; ++c) {
      const Acc weight = channel_value<Acc>(a.weight, first + c, Acc(1)), bias = channel_value<Acc>(a.bias, first + c, Acc(0));
      columns<Acc>(c * shape.channel, (c + 1) * shape.channel,
                   [&](int64_t j, auto n) { store(y, j, n, (load<Acc>(x, j, n) - mean) * rstd * weight + bias); });
    }
  }
  if (stream) stream_fence();
}

template <class T, class Acc> [[gnu::flatten]] void backward(const GroupNormBackward& a, int64_t begin, int64_t end) {
  const GroupNormShape& shape = a.shape;
  const int64_t cols = shape.cols(), all = shape.all_channels();
  for (int64_t i = begin; i < end; ++i) {
    const auto dy = row<T>(a.dy, i), x = row<T>(a.x, i);
    const Acc mean = static_cast<const Acc*>(a.mean)[i], rstd = static_cast<const Acc*>(a.rstd)[i];
    const int64_t first = i % shape.groups * shape.channels;
    Acc* const partial = static_cast<Acc*>(a.workspace) + i / shape.groups * 2 * all + first;
    Acc g = 0, gn = 0;
    for (int64_t c = 0; c < shape.channels; ++c) {
      const int64_t at = c * shape.channel;
      const auto sums = sum_columns<Acc, 2>(shape.channel, [&](int64_t j, auto n, vec<Acc>(&terms)[2]) {
        terms[0] = load<Acc>(dy, at + j, n);
        terms[1] = terms[0] * (load<Acc>(x, at + j, n) - mean);
      });
      const Acc weight = channel_value<Acc>(a.weight, first + c, Acc(1)), dyn = sums[1] * rstd;
      partial[c] = dyn;
      partial[all + c] = sums[0];
      g += weight * sums[0];
      gn += weight * dyn;
    }
    if (a.dx.data == nullptr) continue;
    const auto dx = row<T>(a.dx, i);
    const Acc g_mean = g / Acc(cols), gn_mean = gn / Acc(cols);
    for (int64_t c = 0; c < shape.channels; ++c) {
      const Acc weight = channel_value<Acc>(a.weight, first + c, Acc(1));
      columns<Acc>(c * shape.channel, (c + 1) * shape.channel, [&](int64_t j, auto n) {
        const auto normalised = (load<Acc>(x, j, n) - mean) * rstd;
        store(dx, j, n, rstd * (load<Acc>(dy, j, n) * weight - g_mean - normalised * gn_mean));
      });
    }
  }
}

}  // namespace

template <> void run(const GroupNormForward& a, int64_t begin, int64_t end) {
  dispatch(a.x.dtype, [&](auto t) { forward<decltype(t), accumulator_type<decltype(t)>>(a, begin, end); });
}
template <> void run(const GroupNormBackward& a, int64_t begin, int64_t end) {
  dispatch(a.x.dtype, [&](auto t) { backward<decltype(t), accumulator_type<decltype(t)>>(a, begin, end); });
}

}  // namespace liger::cpu::LIGER_ISA
