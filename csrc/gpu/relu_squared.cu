// Squared ReLU, y = max(x, 0)^2. Bound by memory: forward reads x and writes y; backward reads dy and x and writes dx; each element once. A
// thread issues all of its loads before it uses the first value. Tensors without gaps between rows are one long row.
#include "kernels/relu_squared.h"

#include "gpu/device.h"
#include "gpu/tiles.h"
#include "launch/relu_squared.h"

namespace liger::gpu {
namespace {

using launch::Instance;

template <class T, int VEC> struct ReluSquaredForwardKernel {
  struct Args {
    Tiles tiles;
    ReluSquaredForward op;
  };
  static constexpr int K = launch::relu_squared_k, max_threads = launch::relu_squared_forward.instance(VEC).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    const Tile<VEC, K> tile(a.tiles);
    const int64_t row = tile.row;
    const auto columns = tile.columns();
    Packed<T, VEC> x[K];
    columns.template load<Hint::stream>(x, a.op.x.data, row * a.op.x.stride);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float y[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) y[i] = x[k][i] <= 0 ? 0.f : x[k][i] * x[k][i];  // NaN <= 0 is false: NaN stays
      x[k].set(y);
    }
    columns.template store<Hint::stream>(x, a.op.y.data, row * a.op.y.stride);
  }
};

template <class T, int VEC> struct ReluSquaredBackwardKernel {
  struct Args {
    Tiles tiles;
    ReluSquaredBackward op;
  };
  static constexpr int K = launch::relu_squared_k, max_threads = launch::relu_squared_backward.instance(VEC).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    const Tile<VEC, K> tile(a.tiles);
    const int64_t row = tile.row;
    const auto columns = tile.columns();
    Packed<T, VEC> dy[K], x[K];
    columns.template load<Hint::stream>(dy, a.op.dy.data, row * a.op.dy.stride);
    columns.template load<Hint::stream>(x, a.op.x.data, row * a.op.x.stride);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float dx[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) dx[i] = x[k][i] <= 0 ? 0.f : 2 * x[k][i] * dy[k][i];
      x[k].set(dx);
    }
    columns.template store<Hint::stream>(x, a.op.dx.data, row * a.op.dx.stride);
  }
};

template <template <class, int> class Kernel, const launch::Kernel& Instances, class Op> void start(const Op& a, Stream stream) {
  if (a.rows == 0 || a.cols == 0) return;
  const launch::Launch config = launch::op_launch(device_profile(stream.device), a);
  const Tiles tiles(config);
  dispatch(a.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_instance<Instances, fits<T>>(config, [&]<Instance I>() { launch<Kernel<T, I.vec>>(config, {tiles, a}, stream); });
  });
}

}  // namespace

void relu_squared_forward(const ReluSquaredForward& a, Stream stream) {
  start<ReluSquaredForwardKernel, launch::relu_squared_forward>(a, stream);
}
void relu_squared_backward(const ReluSquaredBackward& a, Stream stream) {
  start<ReluSquaredBackwardKernel, launch::relu_squared_backward>(a, stream);
}

}  // namespace liger::gpu
