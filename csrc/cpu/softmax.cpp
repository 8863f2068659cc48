// Softmax on the CPU. A row is read three times, the last two from L2 as long as it fits: maximum, sum of exponentials, result.
// A 16-bit result computes the exponentials again, because rounding them before they are scaled would be a second rounding.
// Infinite maxima need no special case: inf - inf is a NaN, and its row is NaN as in PyTorch.
#include "kernels/softmax.h"

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

template <class T, class A>
[[gnu::flatten]] void forward(const SoftmaxForward& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.y, a.rows, a.cols);
  for (int64_t i = begin; i < end; ++i) {
    const auto x = row<T>(a.x, i);
    const auto y = row<T>(a.y, i, stream);
    const A max = max_columns<A>(a.cols, [&](int64_t j, auto n) { return load<A>(x, j, n); });
    const A sum = sum_columns<A>(a.cols, [&](int64_t j, auto n) { return Math<A>::exp(load<A>(x, j, n) - max); });
    const A scale = A(1) / sum;
    columns<A>(a.cols, [&](int64_t j, auto n) { store(y, j, n, Math<A>::exp(load<A>(x, j, n) - max) * scale); });
  }
  if (stream) stream_fence();
}

template <class T, class A>
[[gnu::flatten]] void backward(const SoftmaxBackward& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.dx, a.rows, a.cols);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t next = i + 1 < end ? i + 1 : i;
    const auto dy = row<T>(a.dy, i), y = row<T>(a.y, i), next_dy = row<T>(a.dy, next), next_y = row<T>(a.y, next);
    const auto dx = row<T>(a.dx, i, stream);
    const A dot = sum_columns<A>(a.cols, [&](int64_t j, auto n) { return load<A>(dy, j, n) * load<A>(y, j, n); });
    columns<A>(a.cols, [&](int64_t j, auto n) {
      prefetch(next_dy, j);
      prefetch(next_y, j);
      store(dx, j, n, load<A>(y, j, n) * (load<A>(dy, j, n) - dot));
    });
  }
  if (stream) stream_fence();
}

}  // namespace

template <>
void run(const SoftmaxForward& a, int64_t begin, int64_t end) {
  dispatch(a.x.dtype, [&](auto t) { forward<decltype(t), accumulator_of<decltype(t)>>(a, begin, end); });
}

template <>
void run(const SoftmaxBackward& a, int64_t begin, int64_t end) {
  dispatch(a.y.dtype, [&](auto t) { backward<decltype(t), accumulator_of<decltype(t)>>(a, begin, end); });
}

}  // namespace liger::cpu::LIGER_ISA
