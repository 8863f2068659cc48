// Gated activations (SwiGLU, GeGLU): h = act(gate) * up, and multipliers (kernels/glu.h). Bound by memory: forward reads gate and up and
// writes h; backward reads dh, gate and up and writes dgate, dup and optionally h, in place of dh. Each tensor is accessed once. A block
// processes block_threads() * K vectors of one row, or of several short rows (tiles.h), and a thread issues all of its loads before it uses
// the first value. Tensors without gaps between rows are one long row.
//
// All three activations are x * s(x), with the derivative s + x * s'. s is sigmoid(x) (silu), sigmoid(2u) with u = sqrt(2 / pi) * (x +
// 0.044715 x^3) (gelu by tanh: (1 + tanh(u)) / 2 = sigmoid(2u), without the cancellation), or the normal distribution function (gelu).
#include "kernels/glu.h"

#include "gpu/device.h"
#include "gpu/tiles.h"
#include "launch/glu.h"
#include "math/activation.h"

namespace liger::gpu {
namespace {

constexpr int vectors_per_thread = launch::glu_k;

// The GPU's arithmetic for math/activation.h, for fp32 results.
struct Arithmetic {
  using scalar = float;
  static LIGER_DEVICE float exp(float x) { return expf(x); }
  static LIGER_DEVICE float normal_cdf(float x) { return 0.5f * erfcf(x * -0.70710678118654752f); }
};
using GateValue = math::ValueAndSlope<float>;  // x * s, and its derivative
// Returns the normal distribution function at -|x| for 16-bit results, where erff would take longer than the memory accesses. It is
// exp(-x^2 / 2), which the density needs too, times a polynomial of 1 / (1 + 0.29 |x|) (the form of Abramowitz and Stegun 7.1.26). The
// error is 8e-8 absolute and, in the tail, at most 8e-5 relative. 1 + erff is less exact there, since its digits cancel.
LIGER_DEVICE float normal_tail(float x, float exponential) {
  const float t = fast_reciprocal(1 + 0.29f * fabsf(x));
  constexpr float c[] = {1.168634482e-01f, 1.008416554e-01f, 1.790522963e-01f, -9.236817693e-02f, 2.842352859e-01f, -8.862444395e-02f};
  float p = c[5];
#pragma unroll
  for (int i = 4; i >= 0; --i) p = p * t + c[i];
  return exponential * (p * t);
}
// Returns act(x) and its derivative for results of type T. fp32 results take the exact formulas.
template <class T, Activation A> LIGER_DEVICE GateValue activation_value(float x) {
  constexpr bool exact = std::is_same_v<T, float>;
  const auto from = [x](float s, float slope) { return GateValue{x * s, s + x * slope}; };  // s and its derivative
  if constexpr (A == Activation::gelu) {
    if constexpr (exact) return math::Gelu<Arithmetic, exact>::value_and_slope(x);
    constexpr float density = 0.39894228040143268f;
    const float exponential = fast_exp(-0.5f * x * x), tail = normal_tail(x, exponential);
    return from(x < 0 ? tail : 1 - tail, density * exponential);
  } else if constexpr (A == Activation::silu) {
    if constexpr (exact) return math::Silu<Arithmetic, exact>::value_and_slope(x);
    const float s = fast_reciprocal(1 + fast_exp(-x));
    return from(s, s * (1 - s));
  } else {
    if constexpr (exact) return math::GeluTanh<Arithmetic, exact>::value_and_slope(x);
    constexpr float a = 1.5957691216057308f, b = 0.044715f;  // a = 2 sqrt(2 / pi)
    const float s = fast_reciprocal(1 + fast_exp(-x * (a + a * b * x * x)));
    return from(s, s * (1 - s) * (a + 3 * a * b * x * x));
  }
}

template <class T, int VEC, Activation A> struct GluForwardKernel {
  struct Args {
    Tiles tiles;
    GluForward glu;
  };
  static constexpr int K = vectors_per_thread, max_threads = launch::glu_forward.instance(VEC).max_threads, min_blocks = 4;
  static LIGER_DEVICE void run(const Args& args) {
    const GluForward& a = args.glu;
    const float gate_multiplier = float(a.gate_multiplier), down_multiplier = float(a.down_multiplier);
    const Tile<VEC, K> tile(args.tiles);
    const int64_t row = tile.row;
    const auto columns = tile.columns();
    Packed<T, VEC> gate[K], up[K];
    columns.template load<Hint::stream>(gate, a.gate.data, row * a.gate.stride);
    columns.template load<Hint::stream>(up, a.up.data, row * a.up.stride);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float h[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float x = gate[k][i] * gate_multiplier;
        h[i] = down_multiplier * activation_value<T, A>(x).value * up[k][i];
      }
      gate[k].set(h);
    }
    columns.template store<Hint::stream>(gate, a.h.data, row * a.h.stride);
  }
};

// WithH: h is stored in place of dh. These are separate kernels, because those without h have no register to spare.
template <class T, int VEC, Activation A, bool WithH> struct GluBackwardKernel {
  struct Args {
    Tiles tiles;
    GluBackward glu;
  };
  static constexpr int K = vectors_per_thread, max_threads = launch::glu_backward.instance(VEC).max_threads, min_blocks = 4;
  static LIGER_DEVICE void run(const Args& args) {
    const GluBackward& a = args.glu;
    const float gate_multiplier = float(a.gate_multiplier), down_multiplier = float(a.down_multiplier);
    const Tile<VEC, K> tile(args.tiles);
    const int64_t row = tile.row;
    const auto columns = tile.columns();
    Packed<T, VEC> dh[K], gate[K], up[K];
    // A thread overwrites dh by h only where it alone has loaded dh.
    columns.template load<WithH ? Hint::in_place : Hint::stream>(dh, a.dh.data, row * a.dh.stride);
    columns.template load<Hint::stream>(gate, a.gate.data, row * a.gate.stride);
    columns.template load<Hint::stream>(up, a.up.data, row * a.up.stride);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float dgate[VEC], dup[VEC], h[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float x = gate[k][i] * gate_multiplier, d = down_multiplier * dh[k][i];
        const GateValue g = activation_value<T, A>(x);
        dup[i] = d * g.value;
        dgate[i] = d * up[k][i] * g.slope * gate_multiplier;
        if constexpr (WithH) h[i] = down_multiplier * g.value * up[k][i];  // as in the forward
      }
      if constexpr (WithH) dh[k].set(h);
      gate[k].set(dgate);
      up[k].set(dup);
    }
    columns.template store<Hint::stream>(gate, a.dgate.data, row * a.dgate.stride);
    columns.template store<Hint::stream>(up, a.dup.data, row * a.dup.stride);
    if constexpr (WithH) columns.template store<Hint::stream>(dh, a.h.data, row * a.h.stride);
  }
};

template <class T, int VEC, Activation A> using GluGradients = GluBackwardKernel<T, VEC, A, false>;
template <class T, int VEC, Activation A> using GluGradientsAndH = GluBackwardKernel<T, VEC, A, true>;

// Launches Kernel<T, VEC, A> for the dtype, alignment and activation of `a`.
template <template <class, int, Activation> class Kernel, const launch::Kernel& Instances, class Glu>
void start(const Glu& a, Stream stream) {
  if (a.rows == 0 || a.cols == 0) return;
  const launch::Launch config = launch::op_launch(device_profile(stream.device), a);
  const Tiles tiles(config);
  dispatch(a.gate.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_instance<Instances, fits<T>>(config, [&]<Instance I>() {
      if (a.activation == Activation::silu) launch<Kernel<T, I.vec, Activation::silu>>(config, {tiles, a}, stream);
      else if (a.activation == Activation::gelu) launch<Kernel<T, I.vec, Activation::gelu>>(config, {tiles, a}, stream);
      else launch<Kernel<T, I.vec, Activation::gelu_tanh>>(config, {tiles, a}, stream);
    });
  });
}

}  // namespace

void glu_forward(const GluForward& a, Stream stream) { start<GluForwardKernel, launch::glu_forward>(a, stream); }
void glu_backward(const GluBackward& a, Stream stream) {
  if (a.h.data) start<GluGradientsAndH, launch::glu_backward>(a, stream);
  else start<GluGradients, launch::glu_backward>(a, stream);
}

}  // namespace liger::gpu
