// Copies 16-byte vectors, each thread `K` of them, all loads issued before the first store: bound by device memory alone.
#include "kernels/stream_copy.h"

#include "gpu/device.h"
#include "gpu/platform.h"

namespace liger::gpu {
namespace {

template <int K> struct StreamCopyKernel {
  struct Args {
    int64_t vectors;
    const float* in;
    float* out;
  };
  static constexpr int max_threads = launch::piece_threads;
  static LIGER_DEVICE void run(const Args& a) {
    const int64_t first = block_id() * block_threads() * K + thread_id();
    Vec<float, 4> v[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (const int64_t i = first + k * block_threads(); i < a.vectors) load<Hint::stream>(v[k], a.in + 4 * i);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (const int64_t i = first + k * block_threads(); i < a.vectors) store<Hint::stream>(a.out + 4 * i, v[k]);
  }
};

}  // namespace

void stream_copy(const StreamCopy& a, Stream stream) {
  const int64_t vectors = a.bytes / 16;
  const auto start = [&](auto k) {
    constexpr int K = decltype(k)::value;
    const auto plan = launch::plan_stream_copy(device_profile(stream.device), vectors, K);
    launch<StreamCopyKernel<K>>(plan, {vectors, static_cast<const float*>(a.in), static_cast<float*>(a.out)}, stream);
  };
  if (a.per_thread == 1) start(std::integral_constant<int, 1>{});
  else if (a.per_thread == 2) start(std::integral_constant<int, 2>{});
  else if (a.per_thread == 4) start(std::integral_constant<int, 4>{});
  else start(std::integral_constant<int, 8>{});
}

}  // namespace liger::gpu
