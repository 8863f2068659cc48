// Softmax over rows and its backward. Bound by memory: most rows are read once and written once. In between, the registers of a block or a
// cluster of blocks hold it (HeldRow). Rows that are too long for that, and long rows that are not whole vectors, take registers and shared
// memory, and the second pass reads the remaining vectors again (LongRow). Each thread computes exponentials relative to the maximum of its
// own elements, so that the threads of a row exchange values once, not twice. The backward exchanges sum(dy * y). Exponentials are computed
// twice, because registers for them would cost more. Instructions are the second limit.
//
// The maximum ignores NaN, but the sum does not, and passes it to all results. A row of -inf, or one with +inf, yields NaN, as in PyTorch.
#include "kernels/softmax.h"

#include "gpu/device.h"
#include "gpu/online_softmax.h"
#include "gpu/two_passes.h"
#include "launch/softmax.h"

namespace liger::gpu {
namespace {

// Computes exp(x - max) / sum. For 16-bit types: a subtraction, a multiply-add and an exponential, with the logarithm of the sum in the
// exponent. For fp32: the reciprocal of the sum, corrected by its rounding error, which is about as exact as a division per element.
template <class T> struct Share {
  float max, factor, rounded_off = 0;
  LIGER_DEVICE explicit Share(const Exponentials& row) : max(row.max), factor(sizeof(T) == 2 ? -log2f(row.sum) : 1 / row.sum) {
    if constexpr (sizeof(T) == 4) rounded_off = fmaf(-row.sum, factor, 1.f) * factor;
  }
  LIGER_DEVICE float operator()(float x) const {
    if constexpr (sizeof(T) == 2) return fast_exp2((x - max) * log2_e + factor);
    const float exponential = exp_as<T>(x - max);
    return fmaf(exponential, factor, exponential * rounded_off);
  }
};

// y = exp(x - max) / sum(exp(x - max))
template <class T, class Row> LIGER_DEVICE void forward(const TwoPassArgs& a) {
  typename Row::Group group(a.threads_per_row);
  Row x(a, group);
  auto exponentials = x.template statistic<VectorExponentials<T>>();
  exponentials.template merge<T>(group);
  x.map(a.out, Share<T>(exponentials));
}

// Computes sum(dy * y). For fp32 the rounding errors of all products and additions are summed, too, and added at the end (Ogita, Rump and
// Oishi: Accurate Sum and Dot Product, 2005), because dy - sum cancels where one y is nearly 1.
template <class T> struct Dot {
  std::conditional_t<sizeof(T) == 4, ExactSum, float> sum = {};

  template <int VEC, int K, class F> LIGER_DEVICE Dot(const Packed<T, VEC> (&dy_and_y)[2][K], F has) { add(dy_and_y, has); }
  // Vectors past the end of the row are zeros.
  template <int VEC, int K, class F> LIGER_DEVICE void add(const Packed<T, VEC> (&dy_and_y)[2][K], F) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float dy = dy_and_y[0][k][i], y = dy_and_y[1][k][i], product = dy * y;
        if constexpr (sizeof(T) == 4) ExactSum::join(sum.v, {product, fmaf(dy, y, -product)});
        else sum += product;
      }
  }
  template <class Group> LIGER_DEVICE float total(Group& group) {
    if constexpr (sizeof(T) == 4) {
      group.reduce(sum.v, ExactSum::join);
      return sum.total();
    } else {
      return group.sum(sum);
    }
  }
};

// dx = y * (dy - sum(dy * y)). For fp32 the rounding error of the product dy * y is added, so that cancellation does not magnify it.
template <class T, class Row> LIGER_DEVICE void backward(const TwoPassArgs& a) {
  typename Row::Group group(a.threads_per_row);
  Row dy_and_y(a, group);
  const float sum = dy_and_y.template statistic<Dot<T>>().total(group);
  dy_and_y.map(a.out, [&](float dy, float y) {
    if constexpr (sizeof(T) == 2) return y * (dy - sum);
    const float product = dy * y;
    return fmaf(-y, sum, product) + fmaf(dy, y, -product);
  });
}

template <class T, int VEC, int K> struct SoftmaxRegisters {
  using Args = TwoPassArgs;
  static constexpr int max_threads = launch::softmax_registers.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) { forward<T, HeldRow<T, VEC, K, 1, (VEC > 1 && K == launch::softmax_forward_k)>>(a); }
};
template <class T, int VEC, int K> struct SoftmaxLong {
  using Args = TwoPassArgs;
  static constexpr int max_threads = launch::softmax_long.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) { forward<T, LongRow<T, VEC, K, 1>>(a); }
};
template <class T, int VEC, int K> struct SoftmaxBackwardRegisters {
  using Args = TwoPassArgs;
  static constexpr int max_threads = launch::softmax_backward_registers.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) { backward<T, HeldRow<T, VEC, K, 2, (VEC > 1 && K == launch::softmax_backward_k)>>(a); }
};
template <class T, int VEC, int K> struct SoftmaxBackwardLong {
  using Args = TwoPassArgs;
  static constexpr int max_threads = launch::softmax_backward_long.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) { backward<T, LongRow<T, VEC, K, 2>>(a); }
};

// Launches a softmax kernel. Short and Long: the tables of instances of the kernels Registers and Any. a: op's rows.
template <const launch::Kernel& Short, const launch::Kernel& Long, template <class, int, int> class Registers,
          template <class, int, int> class Any, class Op>
void start(TwoPassArgs a, const Op& op, Stream stream) {
  if (a.rows == 0 || a.cols == 0) return;
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  a.threads_per_row = config.plan.threads_per_row;
  a.slots = config.plan.slots;
  a.shared_offset = config.plan.shared_offset;
  dispatch(a.out.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (config.is(Long)) with_instance<Long, fits<T>>(config, [&]<Instance I>() { launch<Any<T, I.vec, I.k>>(config, a, stream); });
    else with_instance<Short, fits<T>>(config, [&]<Instance I>() { launch<Registers<T, I.vec, I.k>>(config, a, stream); });
  });
}

}  // namespace

void softmax_forward(const SoftmaxForward& op, Stream stream) {
  start<launch::softmax_registers, launch::softmax_long, SoftmaxRegisters, SoftmaxLong>({op.rows, op.cols, {op.x}, op.y}, op, stream);
}
void softmax_backward(const SoftmaxBackward& op, Stream stream) {
  start<launch::softmax_backward_registers, launch::softmax_backward_long, SoftmaxBackwardRegisters, SoftmaxBackwardLong>(
      {op.rows, op.cols, {op.dy, op.y}, op.dx}, op, stream);
}

}  // namespace liger::gpu
