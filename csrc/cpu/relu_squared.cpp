// Squared ReLU on the CPU: elementwise, bound by memory.
#include "kernels/relu_squared.h"

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

// max(v, 0), and NaN for a NaN.
template <class V> LIGER_INLINE V relu(V v) { return v <= 0 ? V{} : v; }

template <class T, class Acc> [[gnu::flatten]] void forward(const ReluSquaredForward& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.y, a.rows, a.cols);
  for (int64_t i = begin; i < end; ++i) {
    const auto x = row<T>(a.x, i);
    const auto y = row<T>(a.y, i, stream);
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      const auto positive = relu(load<Acc>(x, j, n));
      store(y, j, n, positive * positive);
    });
  }
  if (stream) stream_fence();
}

template <class T, class Acc> [[gnu::flatten]] void backward(const ReluSquaredBackward& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.dx, a.rows, a.cols);
  for (int64_t i = begin; i < end; ++i) {
    const auto dy = row<T>(a.dy, i), x = row<T>(a.x, i);
    const auto dx = row<T>(a.dx, i, stream);
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      const auto v = load<Acc>(x, j, n);
      store(dx, j, n, v <= 0 ? vec<Acc>{} : Acc(2) * v * load<Acc>(dy, j, n));
    });
  }
  if (stream) stream_fence();
}

}  // namespace

template <> void run(const ReluSquaredForward& a, int64_t begin, int64_t end) {
  dispatch(a.x.dtype, [&](auto t) { forward<decltype(t), accumulator_type<decltype(t)>>(a, begin, end); });
}

template <> void run(const ReluSquaredBackward& a, int64_t begin, int64_t end) {
  dispatch(a.x.dtype, [&](auto t) { backward<decltype(t), accumulator_type<decltype(t)>>(a, begin, end); });
}

}  // namespace liger::cpu::LIGER_ISA
