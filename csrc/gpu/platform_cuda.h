// CUDA's implementation of the names in platform.h.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

#include "kernels/errors.h"

#define LIGER_DEVICE __device__ __forceinline__

namespace liger::gpu {

// Whether instances are compiled for clusters and for rows that asynchronous or bulk copies load ahead of their use. (Whether the code of
// one architecture has these copies: has_bulk_copies, has_async_copies.)
constexpr bool may_have_clusters = true;

template <class To, class From> LIGER_DEVICE To bit_cast(const From& from) {
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
LIGER_DEVICE float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
LIGER_DEVICE uint16_t float_to_half(float v) { return __half_as_ushort(__float2half_rn(v)); }

// Conversions to bf16: one value, or two, with `low` in the lower half. GPUs before Ampere have no instruction for them, and the toolkit's
// function branches there.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
LIGER_DEVICE uint16_t float_to_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
LIGER_DEVICE uint32_t floats_to_bf16s(float low, float high) { return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high)); }
#else
// Rounds to the nearest bf16, ties to even, in the upper half; NaN becomes the same bits as with the instruction.
LIGER_DEVICE uint32_t rounded_to_bf16(float v) {
  const uint32_t bits = bit_cast<uint32_t>(v);
  return v != v ? 0x7fff0000u : bits + 0x7fffu + (bits >> 16 & 1);
}
LIGER_DEVICE uint16_t float_to_bf16(float v) { return uint16_t(rounded_to_bf16(v) >> 16); }
LIGER_DEVICE uint32_t floats_to_bf16s(float low, float high) { return __byte_perm(rounded_to_bf16(low), rounded_to_bf16(high), 0x7632); }
#endif
LIGER_DEVICE uint32_t floats_to_halves(float low, float high) { return bit_cast<uint32_t>(__floats2half2_rn(low, high)); }

// The elementwise maxima of two pairs of values. The maximum of a NaN and a number is the number.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define LIGER_HAS_PAIRS 1
LIGER_DEVICE uint32_t bf16_maxima(uint32_t a, uint32_t b) {
  return bit_cast<uint32_t>(__hmax2(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b)));
}
LIGER_DEVICE uint32_t half_maxima(uint32_t a, uint32_t b) {
  return bit_cast<uint32_t>(__hmax2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
}
// The elementwise products of two pairs of values, rounded once.
LIGER_DEVICE uint32_t bf16_products(uint32_t a, uint32_t b) {
  return bit_cast<uint32_t>(__hmul2(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b)));
}
LIGER_DEVICE uint32_t half_products(uint32_t a, uint32_t b) {
  return bit_cast<uint32_t>(__hmul2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
}
#endif

LIGER_DEVICE int thread_id() { return int(threadIdx.x); }
LIGER_DEVICE int block_threads() { return int(blockDim.x); }
LIGER_DEVICE int64_t block_id() { return int64_t(blockIdx.x); }
LIGER_DEVICE int64_t grid_blocks() { return int64_t(gridDim.x); }
LIGER_DEVICE constexpr int warp_width() { return 32; }
LIGER_DEVICE int lane_id() { return int(threadIdx.x % 32); }
LIGER_DEVICE int warp_id() { return int(threadIdx.x / 32); }
LIGER_DEVICE void block_barrier() { __syncthreads(); }
// Whether group_barrier() waits for less than the block.
constexpr bool has_group_barriers = true;
// A barrier of one thread group of the block: `threads` threads, which are whole warps; at most 15 groups.
LIGER_DEVICE void group_barrier(int group, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory"); }

// Thread block clusters, from Hopper on; elsewhere every block is a cluster of its own.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LIGER_HAS_CLUSTERS 1
LIGER_DEVICE int cluster_blocks() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
}
LIGER_DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// A barrier of all threads of the cluster, in two halves: arrive, and wait for the others. It orders no memory accesses except the
// initialisation of mbarriers. With release semantics arrive would wait for this thread's accesses to global memory (docs/measurements.md).
LIGER_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
LIGER_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Messages between the blocks of a cluster (floats that other blocks store in this block's shared memory), and bulk copies. An Mbarrier,
// which is an mbarrier in shared memory, counts the bytes that have arrived. One thread announces how many bytes a phase brings
// (expect_bytes); the phase ends when all of them have arrived (wait_for_phase).
using Mbarrier = uint64_t;
LIGER_DEVICE unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
LIGER_DEVICE void init_mbarrier(Mbarrier* mbarrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(mbarrier)) : "memory");
}
LIGER_DEVICE void expect_bytes(Mbarrier* mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(bytes) : "memory");
}
// Waits without acquire semantics for the whole cluster: the data of a phase do not need them, and they would empty the L1.
LIGER_DEVICE void wait_for_phase(Mbarrier* mbarrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(shared_address(mbarrier)),
      "r"(parity)
      : "memory");
}
// Stores *at = v in the shared memory of the cluster's block `rank`. That block's mbarrier counts the bytes.
LIGER_DEVICE void send(float* at, Mbarrier* mbarrier, int rank, float v) {
  asm volatile(
      "{ .reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counter]; }" ::"r"(shared_address(at)),
      "r"(shared_address(mbarrier)), "r"(rank), "r"(bit_cast<int>(v))
      : "memory");
}
// Copies `bytes` from global to shared memory; addresses and size are multiples of 16. The mbarrier counts the bytes.
constexpr bool has_bulk_copies = true;
LIGER_DEVICE void bulk_copy(void* to, const void* from, int bytes, Mbarrier* mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(mbarrier))
               : "memory");
}
// A fence between this thread's loads from shared memory and later bulk copies. Without it a copy may overwrite bytes that an earlier load
// has not read yet.
LIGER_DEVICE void finish_reads_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
LIGER_DEVICE constexpr int cluster_blocks() { return 1; }
LIGER_DEVICE constexpr int cluster_rank() { return 0; }
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define LIGER_HAS_ASYNC_COPIES
// Copies 16 bytes from global to shared memory, without a register. The copy belongs to this thread's current group of copies; the thread
// closes groups (close_copies) and waits for them (wait_for_copies).
constexpr bool has_async_copies = true;
LIGER_DEVICE void async_copy(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
LIGER_DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `left` groups, 0 to 3, are in flight.
LIGER_DEVICE void wait_for_copies(int left) {
  if (left == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  else if (left == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (left == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else asm volatile("cp.async.wait_group 3;" ::: "memory");
}
#endif
// Returns the first lane's value in all lanes of a warp. The compiler then treats the value as uniform.
LIGER_DEVICE int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }
LIGER_DEVICE int64_t uniform(int64_t v) { return __shfl_sync(0xffffffffu, static_cast<long long>(v), 0); }
// Returns true in one lane of a warp; all lanes must call it. The compiler then treats a branch on it as one thread's.
LIGER_DEVICE bool is_elected_lane() {
#if defined(LIGER_HAS_CLUSTERS)
  unsigned is_it;
  asm volatile("{ .reg .pred it; elect.sync _|it, 0xffffffff; selp.u32 %0, 1, 0, it; }" : "=r"(is_it));
  return is_it != 0;
#else
  return lane_id() == 0;
#endif
}
// The position of the highest set bit of v > 0.
LIGER_DEVICE int highest_bit(int v) { return 31 - __clz(v); }
// A kernel launched with `pdl` may start while the previous kernel on the stream still runs, as soon as all blocks of that kernel have
// called let_next_kernel_start() or ended. It may read that kernel's results only after wait_for_previous_kernel().
LIGER_DEVICE void let_next_kernel_start() {
#if defined(LIGER_HAS_CLUSTERS)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
LIGER_DEVICE void wait_for_previous_kernel() {
#if defined(LIGER_HAS_CLUSTERS)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
LIGER_DEVICE void warp_barrier() { __syncwarp(); }
LIGER_DEVICE float shfl_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
LIGER_DEVICE int shfl_xor(int v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
// Calls f(mask) for width / 2, width / 4 ... 1. `width` is a power of two, and need not be a compile-time constant.
template <class F> LIGER_DEVICE void for_masks_below(int width, const F& f) {
#pragma unroll 1
  for (int mask = width / 2; mask > 0; mask /= 2) f(mask);
}
// The larger value; NaN if either is NaN (fmaxf would drop it).
LIGER_DEVICE float max_nan(float a, float b) { return a > b || a != a ? a : b; }
// One instruction, 2 ulp; results below the normal range become 0.
LIGER_DEVICE float fast_exp2(float v) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}
// One instruction, for normal numbers. The error is 2^-22 between 1/2 and 2, and 2 ulp elsewhere.
LIGER_DEVICE float fast_log2(float v) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}
// 1 / sqrt(v), 2 ulp.
LIGER_DEVICE float fast_rsqrt(float v) { return rsqrtf(v); }
// Returns the same pointer to global memory, but hides its computation: the compiler then keeps a row's address instead of recomputing it
// for every access. The compiler still treats the memory as global.
template <class T> LIGER_DEVICE T* opaque(T* pointer) {
  size_t address = __cvta_generic_to_global(pointer);
  asm("" : "+l"(address));
  return static_cast<T*>(__cvta_global_to_generic(address));
}
// a * b, rounded: the compiler cannot contract it into a multiply-add.
LIGER_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
// 1 / v, 1 ulp.
LIGER_DEVICE float fast_reciprocal(float v) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// Makes the compiler assume that the words have changed, so that it recomputes values from them instead of keeping earlier results in
// registers.
template <int N> LIGER_DEVICE void forget(uint32_t (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(words[i]));
}
template <int N> LIGER_DEVICE void forget(uint16_t (&words)[N]) {}
// The same for ptxas, which sees through an empty asm. It costs an instruction with threadIdx.y, which is always 0, but ptxas cannot assume
// that. On Blackwell the instruction permutes bytes: for an exclusive or ptxas widened both operands, and so kept the widened word after
// all.
template <int N> LIGER_DEVICE void forget_in_ptxas(uint32_t (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    words[i] = __byte_perm(words[i], 0, 0x3210 + threadIdx.y);
#else
    words[i] ^= threadIdx.y;
#endif
  }
}
template <int N> LIGER_DEVICE void forget_in_ptxas(uint16_t (&words)[N]) {}

// __ldg is ld.global.nc, which PTX forbids for memory that is written while the kernel runs; in_place_load is for such memory.
template <int Bytes> LIGER_DEVICE void constant_load(void* to, const void* from) {
  if constexpr (Bytes == 16) *static_cast<uint4*>(to) = __ldg(static_cast<const uint4*>(from));
  else if constexpr (Bytes == 8) *static_cast<uint2*>(to) = __ldg(static_cast<const uint2*>(from));
  else *static_cast<unsigned*>(to) = __ldg(static_cast<const unsigned*>(from));
}
// The default cache policy: evict-first loads (ld.cs) slow down kernels that read more than they write (docs/measurements.md).
template <int Bytes> LIGER_DEVICE void streaming_load(void* to, const void* from) { constant_load<Bytes>(to, from); }
template <int Bytes> using Word = std::conditional_t<Bytes == 16, uint4, std::conditional_t<Bytes == 8, uint2, unsigned>>;
// ld.global, also by the default policy. Alternatives to *from are __ldlu (last use: its line may be dropped at once), __ldcs (evict-first)
// and __ldcg (not in the L1).
template <int Bytes> LIGER_DEVICE void in_place_load(void* to, const void* from) {
  *static_cast<Word<Bytes>*>(to) = *static_cast<const Word<Bytes>*>(from);
}
// The default policy: evict-first stores (st.cs) slow down the norms' forward (docs/measurements.md).
template <int Bytes> LIGER_DEVICE void streaming_store(void* to, const void* from) {
  if constexpr (Bytes == 16) *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  else if constexpr (Bytes == 8) *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
  else *static_cast<unsigned*>(to) = *static_cast<const unsigned*>(from);
}

LIGER_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char dynamic[];
  return dynamic;
}

// For the record of bad targets in mapped host memory: the first writer wins.
LIGER_DEVICE int atomic_claim(int* flag) { return atomicCAS_system(flag, 0, 1); }
LIGER_DEVICE void publish_to_host() { __threadfence_system(); }

// Blocks of a kernel that a multiprocessor should hold at a time, which bounds the kernel's registers: K::min_blocks, or 1.
template <class K> constexpr int min_blocks_per_multiprocessor() {
  if constexpr (requires { K::min_blocks; }) return K::min_blocks;
  else return 1;
}

template <class K>
__global__ void __launch_bounds__(K::max_threads, min_blocks_per_multiprocessor<K>()) entry(const __grid_constant__ typename K::Args args) {
  K::run(args);
}

[[noreturn]] void throw_unsupported_dtype();
[[noreturn]] void throw_launch_error(int code, const char* what);  // clears the device's last error first

inline cudaLaunchAttribute cluster_attribute(int blocks) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(blocks), 1, 1};
  return attribute;
}

// Allows a kernel as much dynamic shared memory as a block can have, once per device (from device number 64 on, at every call). The amount
// is always the same, so that no host thread lowers the limit that another thread has set.
template <class K> void allow_shared_memory(const void* function, int device) {
  static std::atomic<bool> allowed[64];
  if (device < 64 && allowed[device].load(std::memory_order_relaxed)) return;
  int most = 0;
  auto code = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!code) code = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (code) throw_launch_error(code, "setting shared memory");
  if (device < 64) allowed[device].store(true, std::memory_order_relaxed);
}

template <class K> void launch(const launch::Launch& config, const typename K::Args& args, Stream stream) {
  const launch::LaunchPlan& plan = config.plan;
  void* parameters[] = {const_cast<void*>(static_cast<const void*>(&args))};
  const void* function = reinterpret_cast<const void*>(&entry<K>);
  if (plan.smem > 48 * 1024) allow_shared_memory<K>(function, stream.device);
  cudaLaunchConfig_t cuda_config{dim3(plan.grid), dim3(plan.block), size_t(plan.smem), static_cast<cudaStream_t>(stream.handle)};
  cudaLaunchAttribute attributes[2];
  cuda_config.attrs = attributes;
  if (plan.cluster > 1) attributes[cuda_config.numAttrs++] = cluster_attribute(plan.cluster);
  if (plan.pdl) {
    cudaLaunchAttribute& overlap = attributes[cuda_config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (const auto code = cudaLaunchKernelExC(&cuda_config, function, parameters)) throw_launch_error(code, "launching a kernel");
}

}  // namespace liger::gpu
