// Copies memory as fast as the device can, as the reference for the benchmarks. Each thread copies K vectors of 16 bytes and issues all of
// its loads before its first store.
#include "kernels/stream_copy.h"

#include "gpu/device.h"
#include "gpu/platform.h"
#include "launch/elementwise.h"

namespace liger::gpu {
namespace {

template <int K> struct StreamCopyKernel {
  struct Args {
    int64_t vectors;
    const float* in;
    float* out;
  };
  static constexpr int max_threads = launch::stream_copy_kernel.instance(launch::none, K).max_threads;
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
  const launch::Launch config = launch::op_launch(device_profile(stream.device), a);
  with_instance<launch::stream_copy_kernel>(config, [&]<Instance I>() {
    launch<StreamCopyKernel<I.k>>(config, {a.bytes / 16, static_cast<const float*>(a.in), static_cast<float*>(a.out)}, stream);
  });
}

}  // namespace liger::gpu
