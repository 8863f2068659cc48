// HIP's implementation of the names in platform.h. The number of lanes of a wave is a compile-time constant: 64 on gfx9, 32 on gfx10 and
// later.
#pragma once
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

#include "kernels/errors.h"

#define LIGER_DEVICE __device__ __forceinline__

namespace liger::gpu {

// Whether instances are compiled for clusters and for rows that asynchronous or bulk copies load ahead of their use.
constexpr bool may_have_clusters = false;

template <class To, class From> LIGER_DEVICE To bit_cast(const From& from) {
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
LIGER_DEVICE float half_to_float(uint16_t bits) { return float(bit_cast<_Float16>(bits)); }
LIGER_DEVICE uint16_t float_to_half(float v) { return bit_cast<uint16_t>(_Float16(v)); }
LIGER_DEVICE uint16_t float_to_bf16(float v) { return bit_cast<uint16_t>(__bf16(v)); }

// Conversions of two values, with `low` in the lower half.
LIGER_DEVICE uint32_t floats_to_bf16s(float low, float high) { return float_to_bf16(low) | uint32_t{float_to_bf16(high)} << 16; }
LIGER_DEVICE uint32_t floats_to_halves(float low, float high) { return float_to_half(low) | uint32_t{float_to_half(high)} << 16; }

LIGER_DEVICE int thread_id() { return int(threadIdx.x); }
LIGER_DEVICE int block_threads() { return int(blockDim.x); }
LIGER_DEVICE int64_t block_id() { return int64_t(blockIdx.x); }
LIGER_DEVICE int64_t grid_blocks() { return int64_t(gridDim.x); }
#if defined(__GFX9__)
LIGER_DEVICE constexpr int warp_width() { return 64; }
#else
LIGER_DEVICE constexpr int warp_width() { return 32; }
#endif
LIGER_DEVICE int lane_id() { return int(threadIdx.x % unsigned(warp_width())); }
LIGER_DEVICE int warp_id() { return int(threadIdx.x / unsigned(warp_width())); }
LIGER_DEVICE void block_barrier() { __syncthreads(); }
// Whether group_barrier() waits for less than the block.
constexpr bool has_group_barriers = false;
// There are no barriers for less than a block: the whole block waits.
LIGER_DEVICE void group_barrier(int, int) { block_barrier(); }
// There are no clusters: every block is a cluster of its own.
LIGER_DEVICE constexpr int cluster_blocks() { return 1; }
LIGER_DEVICE constexpr int cluster_rank() { return 0; }
// The position of the highest set bit of v > 0.
LIGER_DEVICE int highest_bit(int v) { return 31 - __builtin_clz(unsigned(v)); }
LIGER_DEVICE int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
LIGER_DEVICE int64_t uniform(int64_t v) { return int64_t(uniform(int(v >> 32))) << 32 | uint32_t(uniform(int(v))); }
LIGER_DEVICE bool is_elected_lane() { return lane_id() == 0; }
LIGER_DEVICE void let_next_kernel_start() {}
LIGER_DEVICE void wait_for_previous_kernel() {}
LIGER_DEVICE void warp_barrier() { __builtin_amdgcn_wave_barrier(); }
// Returns the value of the lane whose number differs in the bit of `mask`, a power of two. __shfl_xor goes through LDS, and needs a
// register for addresses. For most masks that are compile-time constants lanes read each other's registers instead, often in the
// instruction that uses the value (data parallel primitives, in rows of 16 lanes).
template <int Control> LIGER_DEVICE int from_lane(int v) { return __builtin_amdgcn_update_dpp(0, v, Control, 0xf, 0xf, true); }
LIGER_DEVICE int shfl_xor(int v, int mask) {
  constexpr int quad_1032 = 0xb1, quad_2301 = 0x4e;
  if (__builtin_constant_p(mask)) {
    if (mask == 1) return from_lane<quad_1032>(v);
    if (mask == 2) return from_lane<quad_2301>(v);
#if defined(__GFX9__)
    constexpr int quad_3210 = 0x1b, row_half_mirror = 0x141, rotate_row_by_8 = 0x128, swizzle_xor_16 = 16 << 10 | 0x1f;
    if (mask == 4) return from_lane<quad_3210>(from_lane<row_half_mirror>(v));
    if (mask == 8) return from_lane<rotate_row_by_8>(v);
    if (mask == 16) return __builtin_amdgcn_ds_swizzle(v, swizzle_xor_16);  // through LDS too, but without addresses
#else
    constexpr int row_xor = 0x160;
    if (mask == 4) return from_lane<row_xor | 4>(v);
    if (mask == 8) return from_lane<row_xor | 8>(v);
    if (mask == 16) return __builtin_amdgcn_permlanex16(v, v, 0x76543210, 0xfedcba98, false, true);
#endif
  }
  return __shfl_xor(v, mask, warp_width());
}
LIGER_DEVICE float shfl_xor(float v, int mask) { return bit_cast<float>(shfl_xor(bit_cast<int>(v), mask)); }
// Calls f(mask) for width / 2, width / 4 ... 1. `width` is a power of two, and need not be a compile-time constant. Each mask is a
// constant, by recursion: clang 22 did not unroll a loop even for a constant width.
template <int Mask = warp_width() / 2, class F> LIGER_DEVICE void for_masks_below(int width, const F& f) {
  // Hides the width: the compiler otherwise moves the comparisons ahead of a loop over rows where it can, and spills scalar registers.
  if (!__builtin_constant_p(width)) asm volatile("" : "+s"(width));
  if (Mask < width) f(Mask);
  if constexpr (Mask > 1) for_masks_below<Mask / 2>(width, f);
}
LIGER_DEVICE float max_nan(float a, float b) { return a > b || a != a ? a : b; }
// One instruction, 1 ulp; results below the normal range become 0.
LIGER_DEVICE float fast_exp2(float v) { return __builtin_amdgcn_exp2f(v); }
// One instruction, for normal numbers, 1 ulp.
LIGER_DEVICE float fast_log2(float v) { return __builtin_amdgcn_logf(v); }
// 1 / sqrt(v), 1 ulp.
LIGER_DEVICE float fast_rsqrt(float v) { return __builtin_amdgcn_rsqf(v); }
// Marks a pointer as one to global memory, which the compiler cannot always infer: without the mark, accesses may become flat ones, which
// also wait for shared memory.
template <class T> LIGER_DEVICE T* opaque(T* pointer) {
  return (T*)(__attribute__((address_space(1))) T*)reinterpret_cast<uintptr_t>(pointer);
}

// a * b, rounded: the compiler cannot contract it into a multiply-add.
LIGER_DEVICE float rounded_product(float a, float b) {
  float product = a * b;
  asm("" : "+v"(product));
  return product;
}
// 1 / v, 1 ulp.
LIGER_DEVICE float fast_reciprocal(float v) { return __builtin_amdgcn_rcpf(v); }

// Makes the compiler assume that the words have changed: earlier results from them do not stay in registers.
template <int N> LIGER_DEVICE void forget(uint32_t (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+v"(words[i]));
}
template <int N> LIGER_DEVICE void forget(uint16_t (&words)[N]) {}
template <class Words> LIGER_DEVICE void forget_in_ptxas(Words& words) { forget(words); }

// The compiler's vector types: its non-temporal builtins accept no structs.
template <int Bytes> struct NativeWord {
  using type = uint32_t;
};
template <> struct NativeWord<8> {
  using type = uint32_t __attribute__((ext_vector_type(2)));
};
template <> struct NativeWord<16> {
  using type = uint32_t __attribute__((ext_vector_type(4)));
};
template <int Bytes> LIGER_DEVICE void streaming_load(void* to, const void* from) {
  using W = typename NativeWord<Bytes>::type;
  *static_cast<W*>(to) = __builtin_nontemporal_load(static_cast<const W*>(from));
}
template <int Bytes> LIGER_DEVICE void in_place_load(void* to, const void* from) { streaming_load<Bytes>(to, from); }
template <int Bytes> LIGER_DEVICE void constant_load(void* to, const void* from) {
  using W = typename NativeWord<Bytes>::type;
  *static_cast<W*>(to) = *static_cast<const W*>(from);
}
template <int Bytes> LIGER_DEVICE void streaming_store(void* to, const void* from) {
  using W = typename NativeWord<Bytes>::type;
  __builtin_nontemporal_store(*static_cast<const W*>(from), static_cast<W*>(to));
}

LIGER_DEVICE unsigned char* shared_memory() {
  extern __shared__ __attribute__((aligned(16))) unsigned char dynamic[];
  return dynamic;
}

LIGER_DEVICE int atomic_claim(int* flag) { return atomicCAS_system(flag, 0, 1); }
LIGER_DEVICE void publish_to_host() { __threadfence_system(); }

// The number of waves that an execution unit should hold at a time, from which the compiler derives the registers of a thread: four waves
// leave 128 of them on gfx9, as many as blocks of 1,024 threads have in any case. K::min_blocks is the number of blocks that a
// multiprocessor should hold; on gfx9 the waves of a block are spread over four units. (The norms' backward, with one block of 512 threads,
// requests two waves per unit: LayerNorm's spilled with 128 registers.) K::min_waves is for kernels that would spill here with as many
// waves, though not on NVIDIA.
template <class K> constexpr int waves_per_unit() {
  if constexpr (requires { K::min_waves; }) return K::min_waves;
  else if constexpr (requires { K::min_blocks; }) return K::min_blocks * K::max_threads / (4 * 64);
  else return 4;
}
template <class K> __global__ void __launch_bounds__(K::max_threads, waves_per_unit<K>()) entry(const typename K::Args args) {
  K::run(args);
}

[[noreturn]] void throw_unsupported_dtype();
[[noreturn]] void throw_launch_error(int code, const char* what);

template <class K> void launch(const launch::Launch& config, const typename K::Args& args, Stream stream) {
  const launch::LaunchPlan& plan = config.plan;
  void* parameters[] = {const_cast<void*>(static_cast<const void*>(&args))};
  const auto code = hipLaunchKernel(reinterpret_cast<const void*>(&entry<K>), dim3(plan.grid), dim3(plan.block), parameters, plan.smem,
                                    static_cast<hipStream_t>(stream.handle));
  if (code != hipSuccess) throw_launch_error(code, "launching a kernel");
}

}  // namespace liger::gpu
