// CUDA's words for platform.h.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/errors.h"

#define LIGER_DEVICE __device__ __forceinline__

namespace liger::gpu {

template <class To, class From>
LIGER_DEVICE To bit_cast(const From& from) {
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
LIGER_DEVICE float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
LIGER_DEVICE uint16_t float_to_half(float v) { return __half_as_ushort(__float2half_rn(v)); }
LIGER_DEVICE uint16_t float_to_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }

// Two at once, `low` in the lower half.
LIGER_DEVICE uint32_t floats_to_bf16s(float low, float high) { return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high)); }
LIGER_DEVICE uint32_t floats_to_halves(float low, float high) { return bit_cast<uint32_t>(__floats2half2_rn(low, high)); }

LIGER_DEVICE int thread_id() { return int(threadIdx.x); }
LIGER_DEVICE int block_threads() { return int(blockDim.x); }
LIGER_DEVICE int64_t block_id() { return int64_t(blockIdx.x); }
LIGER_DEVICE int64_t grid_blocks() { return int64_t(gridDim.x); }
LIGER_DEVICE constexpr int warp_width() { return 32; }
LIGER_DEVICE int lane_id() { return thread_id() % 32; }
LIGER_DEVICE int warp_id() { return thread_id() / 32; }
LIGER_DEVICE void block_barrier() { __syncthreads(); }
LIGER_DEVICE void warp_barrier() { __syncwarp(); }
LIGER_DEVICE float shfl_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
LIGER_DEVICE int shfl_xor(int v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
// The larger; NaN if either is NaN (fmaxf would drop it).
LIGER_DEVICE float max_nan(float a, float b) { return a > b || a != a ? a : b; }
// One instruction, 2 ulp; results below the normal range become 0.
LIGER_DEVICE float fast_exp2(float v) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}
// The same pointer, hiding how it was made: the compiler keeps a row's address instead of making it again for every access.
template <class T>
LIGER_DEVICE T* opaque(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// 1 / v, 1 ulp.
LIGER_DEVICE float fast_reciprocal(float v) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// The compiler takes the words for new ones: nothing that it computed from them earlier stays in registers.
template <int N>
LIGER_DEVICE void forget(uint32_t (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(words[i]));
}
template <int N>
LIGER_DEVICE void forget(uint16_t (&words)[N]) {}

template <int Bytes>
LIGER_DEVICE void streaming_load(void* to, const void* from) {
  if constexpr (Bytes == 16) *static_cast<uint4*>(to) = __ldcs(static_cast<const uint4*>(from));
  else if constexpr (Bytes == 8) *static_cast<uint2*>(to) = __ldcs(static_cast<const uint2*>(from));
  else *static_cast<unsigned*>(to) = __ldcs(static_cast<const unsigned*>(from));
}
template <int Bytes>
LIGER_DEVICE void streaming_store(void* to, const void* from) {
  if constexpr (Bytes == 16) __stcs(static_cast<uint4*>(to), *static_cast<const uint4*>(from));
  else if constexpr (Bytes == 8) __stcs(static_cast<uint2*>(to), *static_cast<const uint2*>(from));
  else __stcs(static_cast<unsigned*>(to), *static_cast<const unsigned*>(from));
}

LIGER_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char dynamic[];
  return dynamic;
}

// For the host's record of bad targets in mapped memory: first writer wins.
LIGER_DEVICE int atomic_claim(int* flag) { return atomicCAS_system(flag, 0, 1); }
LIGER_DEVICE void publish_to_host() { __threadfence_system(); }

// Blocks of a kernel that a multiprocessor should hold at a time: bounds its registers. K::min_blocks, or 1.
template <class K>
constexpr int min_blocks_of() {
  if constexpr (requires { K::min_blocks; }) return K::min_blocks;
  else return 1;
}

template <class K>
__global__ void __launch_bounds__(K::max_threads, min_blocks_of<K>()) entry(const __grid_constant__ typename K::Args args) { K::run(args); }

[[noreturn]] void throw_unsupported_dtype();
[[noreturn]] void throw_launch_error(int code, const char* what);  // clears the device's last error first

template <class K>
void launch(const launch::LaunchPlan& plan, const typename K::Args& args, Stream stream) {
  void* parameters[] = {const_cast<void*>(static_cast<const void*>(&args))};
  const void* function = reinterpret_cast<const void*>(&entry<K>);
  if (plan.smem > 48 * 1024) {
    if (const auto code = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem))
      throw_launch_error(code, "setting shared memory");
  }
  if (const auto code = cudaLaunchKernel(function, dim3(plan.grid), dim3(plan.block), parameters, plan.smem,
                                         static_cast<cudaStream_t>(stream.handle)))
    throw_launch_error(code, "launching a kernel");
}

}  // namespace liger::gpu
