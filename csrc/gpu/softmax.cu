// Softmax over rows, bound by memory: a row is read once and written once where the threads of a block can hold it (64 columns of
// a 16-bit type each), or those of a cluster of blocks. Longer rows are read twice: each thread keeps a running maximum and the sum
// of exponentials relative to it, the threads' pairs are merged, then the row is read again. The backward has the same two paths
// around sum(dy * y). Registers for the exponentials would cost more than to compute them twice: instructions are the second limit.
//
// Maxima drop NaN, which reaches all results by way of the sum; a row of -inf, or one with +inf, gives NaN, as in PyTorch.
#include "kernels/softmax.h"

#include "gpu/device.h"
#include "gpu/rows.h"
#include "launch/softmax.h"

namespace liger::gpu {
namespace {

struct SoftmaxArgs {
  int64_t rows, cols;
  Rows first, second;  // x; or dy and y
  MutableRows out;
  int threads_per_row = 0;
};

// The value of columns past the last one: its exponential is 0, and it does not raise a maximum.
constexpr float nothing = -__builtin_inff();

// The sum of exp(x - base). Each vector is summed by itself first, so that the large sum is rounded fewer times.
template <class T, int VEC, int K>
LIGER_DEVICE float sum_of_exponentials(const Columns<VEC, K>& columns, const Packed<T, VEC> (&x)[K], float base) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float part = 0;
#pragma unroll
    for (int i = 0; i < VEC; ++i) part += exp_as<T>(x[k][i] - base);
    sum += part;
  }
  return sum;
}
// Stores f(k, i) as element i of vector k, for all columns that the row has.
template <class T, int VEC, int K, class F>
LIGER_DEVICE void write(const Columns<VEC, K>& columns, const MutableRows& out, int64_t row, F f) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = f(k, i);
    Packed<T, VEC> packed;
    packed.set(values);
    store<Hint::stream>(static_cast<T*>(out.data) + (row * out.stride + columns.first + k * columns.step), packed);
  }
}
// A maximum, and the sum of exponentials relative to it. If the maximum is still -inf, they are relative to 0, since -inf - -inf is NaN.
struct Exponentials {
  float max = nothing, sum = 0;
  LIGER_DEVICE float base() const { return max == nothing ? 0 : max; }
};

template <class T, int VEC, int K> LIGER_DEVICE float max_of(const Columns<VEC, K>& columns, const Packed<T, VEC> (&x)[K]) {
  return largest(x, [&](int k) { return columns.has(k); });
}
// exp(x - max) / sum. For 16-bit types by one multiply-add and one exponential, with the logarithm of the sum in the exponent. For fp32 by
// the reciprocal of the sum, corrected by its own rounding error: as exact as a division, without one per element.
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

// Joins the pairs of all threads of a row: the row's maximum and sum.
template <class T, class Group> LIGER_DEVICE Exponentials merged(Group& group, const Exponentials& own) {
  float pair[2] = {own.max, own.sum};
  group.reduce(pair, [](float (&a)[2], const float (&b)[2]) { join_exponentials<T>(a, b); });
  return {pair[0], pair[1]};
}

template <class T, int VEC, int K> struct SoftmaxRegisters {
  using Args = SoftmaxArgs;
  static constexpr int max_threads = launch::softmax_registers.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroupOf<0, (VEC > 1 && K == launch::softmax_forward_k)> group(a.threads_per_row);
    const int64_t row = group.first_row();
    const Columns<VEC, K> columns(group.index, group.threads_per_row, row < a.rows ? int(a.cols) : 0);
    Packed<T, VEC> x[K];
    columns.template load<Hint::stream>(x, a.first.data, row * a.first.stride);
    // Relative to this thread's own maximum, so that the threads of the row exchange values once, not twice.
    Exponentials own{max_of(columns, x)};
    own.sum = sum_of_exponentials(columns, x, own.base());
    const Share<T> share(merged<T>(group, own));
#pragma unroll
    for (int k = 0; k < K; ++k) forget_at_all_costs(x[k].data);
    write<T>(columns, a.out, row, [&](int k, int i) { return share(x[k][i]); });
  }
};

// One block per row, of any length; the row is read twice.
template <class T, int VEC> struct SoftmaxReread {
  using Args = SoftmaxArgs;
  static constexpr int K = 4, max_threads = launch::softmax_reread.instance(VEC).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const int64_t row = block_id(), batch = int64_t{block_threads()} * K * VEC;
    Packed<T, VEC> x[K];
    Exponentials own;
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, a.cols);
      columns.load(x, a.first.data, row * a.first.stride);
      const float before = own.max;
      own.max = fmaxf(own.max, max_of(columns, x));
      if (before != nothing) own.sum *= exp_as<T>(before - own.max);
      own.sum += sum_of_exponentials(columns, x, own.base());
    }
    const Share<T> share(merged<T>(group, own));
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, a.cols);
      columns.load(x, a.first.data, row * a.first.stride);
      write<T>(columns, a.out, row, [&](int k, int i) { return share(x[k][i]); });
    }
  }
};

// sum(dy * y). For fp32 with the rounding errors of each product and each addition added at the end (Ogita, Rump and Oishi: Accurate Sum
// and Dot Product, 2005), because dy - sum cancels where one y is nearly 1.
template <class T> struct Dot {
  std::conditional_t<sizeof(T) == 4, ExactSum, float> sum = {};

  template <int VEC, int K> LIGER_DEVICE void add(const Packed<T, VEC> (&dy)[K], const Packed<T, VEC> (&y)[K]) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float product = dy[k][i] * y[k][i];
        if constexpr (sizeof(T) == 4) ExactSum::join(sum.v, {product, fmaf(dy[k][i], y[k][i], -product)});
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
// y * (dy - sum). For fp32 with the rounding error of the product added: the result is rounded once.
template <class T> LIGER_DEVICE float gradient(float dy, float y, float sum) {
  if constexpr (sizeof(T) == 2) return y * (dy - sum);
  const float product = dy * y;
  return fmaf(-y, sum, product) + fmaf(dy, y, -product);
}

template <class T, int VEC, int K> struct SoftmaxBackwardRegisters {
  using Args = SoftmaxArgs;
  static constexpr int max_threads = launch::softmax_backward_registers.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroupOf<0, (VEC > 1 && K == launch::softmax_backward_k)> group(a.threads_per_row);
    const int64_t row = group.first_row();
    const Columns<VEC, K> columns(group.index, group.threads_per_row, row < a.rows ? int(a.cols) : 0);
    Packed<T, VEC> dy[K], y[K];
    columns.template load<Hint::stream>(dy, a.first.data, row * a.first.stride);
    columns.template load<Hint::stream>(y, a.second.data, row * a.second.stride);
    Dot<T> dot;
    dot.add(dy, y);
    const float sum = dot.total(group);
    write<T>(columns, a.out, row, [&](int k, int i) { return gradient<T>(dy[k][i], y[k][i], sum); });
  }
};

template <class T, int VEC> struct SoftmaxBackwardReread {
  using Args = SoftmaxArgs;
  static constexpr int K = 4, max_threads = launch::softmax_backward_reread.instance(VEC).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const int64_t row = block_id(), batch = int64_t{block_threads()} * K * VEC;
    Packed<T, VEC> dy[K], y[K];
    Dot<T> dot;
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, a.cols);
      columns.load(dy, a.first.data, row * a.first.stride);
      columns.load(y, a.second.data, row * a.second.stride);
      dot.add(dy, y);
    }
    const float sum = dot.total(group);
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, a.cols);
      columns.load(dy, a.first.data, row * a.first.stride);
      columns.load(y, a.second.data, row * a.second.stride);
      write<T>(columns, a.out, row, [&](int k, int i) { return gradient<T>(dy[k][i], y[k][i], sum); });
    }
  }
};

// Held and Long are the tables of instances of the kernels Registers and Reread. plan: launch::softmax_forward or launch::softmax_backward.
template <const launch::Kernel& Held, const launch::Kernel& Long, template <class, int, int> class Registers,
          template <class, int> class Reread, class Plan>
void start(SoftmaxArgs a, Stream stream, Plan plan) {
  if (a.rows == 0 || a.cols == 0) return;
  const bool wide = aligned(a.first, a.cols) && aligned(a.second, a.cols) && aligned(a.out, a.cols);
  const launch::Launch made = plan(device_profile(stream.device), a.rows, a.cols, wide ? 16 / int(size_of(a.out.dtype)) : 1, nullptr);
  a.threads_per_row = made.plan.threads_per_row;
  dispatch(a.out.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (made.of(Long)) with_instance<Long, fits<T>>(made, [&]<Instance I>() { launch<Reread<T, I.vec>>(made, a, stream); });
    else with_instance<Held, fits<T>>(made, [&]<Instance I>() { launch<Registers<T, I.vec, I.k>>(made, a, stream); });
  });
}

}  // namespace

void softmax_forward(const SoftmaxForward& a, Stream stream) {
  start<launch::softmax_registers, launch::softmax_reread, SoftmaxRegisters, SoftmaxReread>({a.rows, a.cols, a.x, {}, a.y}, stream,
                                                                                            launch::softmax_forward);
}
void softmax_backward(const SoftmaxBackward& a, Stream stream) {
  start<launch::softmax_backward_registers, launch::softmax_backward_reread, SoftmaxBackwardRegisters, SoftmaxBackwardReread>(
      {a.rows, a.cols, a.dy, a.y, a.dx}, stream, launch::softmax_backward);
}

}  // namespace liger::gpu
