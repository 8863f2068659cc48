// Softmax on the CPU, in three passes over a row: maximum, sum of exponentials, result. Exponentials cost more than the memory traffic. So
// the second pass stores them, in accumulator precision, in a buffer that fits L2, and the third scales them. Rows that exceed the buffer
// compute their exponentials twice. Infinite maxima need no special case: inf - inf is a NaN, and the row is NaN as in PyTorch.
#include "kernels/softmax.h"

#include <type_traits>

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

template <class T, class Acc> [[gnu::flatten]] void forward(const SoftmaxForward& a, int64_t begin, int64_t end) {
  constexpr int64_t buffered = (128 << 10) / sizeof(Acc);
  alignas(vector_bytes) Acc exponentials[buffered];
  const bool stream = streams(a.y, a.rows, a.cols), keep = a.cols <= buffered;
  for (int64_t i = begin; i < end; ++i) {
    const auto x = row<T>(a.x, i);
    const auto y = row<T>(a.y, i, stream);
    const Acc max = max_columns<Acc>(a.cols, [&](int64_t j, auto n) { return load<Acc>(x, j, n); });
    const Acc sum = sum_columns<Acc>(a.cols, [&](int64_t j, auto n) {
      const auto e = Math<Acc>::exp(load<Acc>(x, j, n) - max);
      if (keep) store<Acc>(exponentials + j, n, e);
      return e;
    });
    const Acc scale = Acc(1) / sum;
    const auto share = [&](auto e) { return std::is_same_v<T, Acc> ? e / sum : e * scale; };  // e * scale suffices in 16 bits
    if (keep) columns<Acc>(a.cols, [&](int64_t j, auto n) { store(y, j, n, share(load<Acc>(exponentials + j, n))); });
    else columns<Acc>(a.cols, [&](int64_t j, auto n) { store(y, j, n, share(Math<Acc>::exp(load<Acc>(x, j, n) - max))); });
  }
  if (stream) stream_fence();
}

template <class T, class Acc> [[gnu::flatten]] void backward(const SoftmaxBackward& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.dx, a.rows, a.cols);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t next = i + 1 < end ? i + 1 : i;
    const auto dy = row<T>(a.dy, i), y = row<T>(a.y, i), next_dy = row<T>(a.dy, next), next_y = row<T>(a.y, next);
    const auto dx = row<T>(a.dx, i, stream);
    const Acc dot = sum_columns<Acc>(a.cols, [&](int64_t j, auto n) { return load<Acc>(dy, j, n) * load<Acc>(y, j, n); });
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      prefetch(next_dy, j);
      prefetch(next_y, j);
      store(dx, j, n, load<Acc>(y, j, n) * (load<Acc>(dy, j, n) - dot));
    });
  }
  if (stream) stream_fence();
}

}  // namespace

template <> void run(const SoftmaxForward& a, int64_t begin, int64_t end) {
  dispatch(a.x.dtype, [&](auto t) { forward<decltype(t), accumulator_type<decltype(t)>>(a, begin, end); });
}

template <> void run(const SoftmaxBackward& a, int64_t begin, int64_t end) {
  dispatch(a.y.dtype, [&](auto t) { backward<decltype(t), accumulator_type<decltype(t)>>(a, begin, end); });
}

}  // namespace liger::cpu::LIGER_ISA
