// Gated activations (SwiGLU, GeGLU) on the CPU: elementwise. Memory bandwidth limits the speed for 32-bit dtypes, the exponential limits it
// for 16-bit dtypes.
#include "kernels/glu.h"

#include <type_traits>

#include "cpu/simd.h"
#include "math/activation.h"

namespace liger::cpu::LIGER_ISA {
namespace {

template <class T, class Acc, template <class, bool> class Activation>
[[gnu::flatten]] void forward(const GluForward& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.h, a.rows, a.cols);
  const Acc gate_scale = Acc(a.gate_multiplier), down_scale = Acc(a.down_multiplier);
  for (int64_t i = begin; i < end; ++i) {
    const auto gate = row<T>(a.gate, i), up = row<T>(a.up, i);
    const auto h = row<T>(a.h, i, stream);
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      const auto activated = Activation<Math<Acc>, std::is_same_v<T, Acc>>::value(load<Acc>(gate, j, n) * gate_scale);
      store(h, j, n, activated * load<Acc>(up, j, n) * down_scale);
    });
  }
  if (stream) stream_fence();
}

template <class T, class Acc, template <class, bool> class Activation>
[[gnu::flatten]] void backward(const GluBackward& a, int64_t begin, int64_t end) {
  const bool stream_gate = streams(a.dgate, a.rows, a.cols), stream_up = streams(a.dup, a.rows, a.cols);
  const Acc gate_scale = Acc(a.gate_multiplier), down_scale = Acc(a.down_multiplier);
  for (int64_t i = begin; i < end; ++i) {
    const auto dh = row<T>(a.dh, i), gate = row<T>(a.gate, i), up = row<T>(a.up, i);
    const auto dgate = row<T>(a.dgate, i, stream_gate), dup = row<T>(a.dup, i, stream_up);
    columns<Acc>(a.cols, [&](int64_t j, auto n) {
      const auto d = load<Acc>(dh, j, n) * down_scale;
      const auto activation = Activation<Math<Acc>, std::is_same_v<T, Acc>>::value_and_slope(load<Acc>(gate, j, n) * gate_scale);
      store(dgate, j, n, d * load<Acc>(up, j, n) * activation.slope * gate_scale);
      store(dup, j, n, d * activation.value);
    });
  }
  if (stream_gate || stream_up) stream_fence();
}

// Calls f with the element type, the accumulator and the activation.
template <class Args, class F> LIGER_INLINE void with_activation(const Args& a, F&& f) {
  dispatch(a.gate.dtype, [&](auto t) {
    using T = decltype(t);
    using Acc = accumulator_type<T>;
    switch (a.activation) {
      case Activation::silu:
        return f.template operator()<T, Acc, math::Silu>();
      case Activation::gelu_tanh:
        return f.template operator()<T, Acc, math::GeluTanh>();
      case Activation::gelu:
        return f.template operator()<T, Acc, math::Gelu>();
    }
  });
}

}  // namespace

template <> void run(const GluForward& a, int64_t begin, int64_t end) {
  with_activation(a, [&]<class T, class Acc, template <class, bool> class Function>() { forward<T, Acc, Function>(a, begin, end); });
}

template <> void run(const GluBackward& a, int64_t begin, int64_t end) {
  with_activation(a, [&]<class T, class Acc, template <class, bool> class Function>() {
    if (!a.h.data) return backward<T, Acc, Function>(a, begin, end);
    // The forward's code recomputes h, so it has the forward's bits. It runs row by row: gate and up are still in the cache, and the
    // backward has read this row of dh, whose memory may be h's.
    const GluForward again{a.rows, a.cols, a.gate, a.up, a.h, a.activation, a.gate_multiplier, a.down_multiplier};
    for (int64_t i = begin; i < end; ++i) {
      backward<T, Acc, Function>(a, i, i + 1);
      forward<T, Acc, Function>(again, i, i + 1);
    }
  });
}

}  // namespace liger::cpu::LIGER_ISA
