// The host target's implementation of the names in platform.h, for tests of kernels without a GPU. A kernel's threads are fibres on the
// CPU, in warps of 32 or 64 (gpu/host/simt.h), and calls that the compiler inserts check their memory accesses (gpu/host/memory.h). It is
// slow.
#pragma once
#include <cmath>
#include <source_location>

#include "gpu/host/simt.h"
#include "kernels/errors.h"
#include "kernels/types.h"

#define LIGER_DEVICE inline

namespace liger::gpu {

using std::source_location;

// LIGER_HOST_AHEAD: the target has the features of Hopper: clusters, bulk copies and asynchronous copies (gpu/host/transfers.h).
// LIGER_HOST_ASYNC, in addition: the device has asynchronous copies only, so that kernels run the code that they run on Ampere.
#if defined(LIGER_HOST_AHEAD)
#define LIGER_HAS_CLUSTERS 1
#define LIGER_HAS_ASYNC_COPIES
constexpr bool may_have_clusters = true, has_async_copies = true;
#if defined(LIGER_HOST_ASYNC)
constexpr bool has_bulk_copies = false;
#else
constexpr bool has_bulk_copies = true;
#endif
#else
constexpr bool may_have_clusters = false;
#endif

template <class To, class From> LIGER_DEVICE To bit_cast(const From& from) { return __builtin_bit_cast(To, from); }
LIGER_DEVICE float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00) return bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(rest << 13) * 0x1p112f));
}
LIGER_DEVICE uint16_t float_to_half(float v) {
  const uint32_t bits = bit_cast<uint32_t>(v), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
  // Below the normal range: the sum with 0.5 is rounded to multiples of 2^-24, the last bit of a half.
  if (rest < 0x38800000) return uint16_t(sign | (bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000));
  return uint16_t(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}
LIGER_DEVICE uint16_t float_to_bf16(float v) {
  const uint32_t bits = bit_cast<uint32_t>(v);
  return uint16_t(v != v ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Conversions of two values, with `low` in the lower half.
LIGER_DEVICE uint32_t floats_to_bf16s(float low, float high) { return float_to_bf16(low) | uint32_t{float_to_bf16(high)} << 16; }
LIGER_DEVICE uint32_t floats_to_halves(float low, float high) { return float_to_half(low) | uint32_t{float_to_half(high)} << 16; }

LIGER_DEVICE int thread_id() { return simt::place().thread; }
LIGER_DEVICE int block_threads() { return simt::place().block_threads; }
LIGER_DEVICE int64_t block_id() { return simt::place().block; }
LIGER_DEVICE int64_t grid_blocks() { return simt::place().grid; }
#if defined(LIGER_HOST_AHEAD)
LIGER_DEVICE constexpr int warp_width() { return 32; }
#else
LIGER_DEVICE int warp_width() { return simt::warp_width(); }
#endif
LIGER_DEVICE int lane_id() { return thread_id() % warp_width(); }
LIGER_DEVICE int warp_id() { return thread_id() / warp_width(); }
LIGER_DEVICE void block_barrier(source_location where = source_location::current()) { simt::block_barrier(where); }
// Whether group_barrier() waits for less than the block.
constexpr bool has_group_barriers = true;
LIGER_DEVICE void group_barrier(int group, int threads, source_location where = source_location::current()) {
  simt::group_barrier(group, threads, where);
}
LIGER_DEVICE int cluster_blocks() { return simt::place().cluster; }
LIGER_DEVICE int cluster_rank() { return simt::place().rank; }
#if defined(LIGER_HOST_AHEAD)
using Mbarrier = uint64_t;
LIGER_DEVICE void cluster_arrive() { simt::cluster_arrive(); }
LIGER_DEVICE void cluster_wait(source_location where = source_location::current()) { simt::cluster_wait(where); }
LIGER_DEVICE void init_mbarrier(Mbarrier* mbarrier) { simt::init_mbarrier(mbarrier); }
LIGER_DEVICE void expect_bytes(Mbarrier* mbarrier, int bytes) { simt::expect_bytes(mbarrier, bytes); }
LIGER_DEVICE void wait_for_phase(Mbarrier* mbarrier, int parity, source_location where = source_location::current()) {
  simt::wait_for_phase(mbarrier, parity, where);
}
LIGER_DEVICE void send(float* at, Mbarrier* mbarrier, int rank, float v) { simt::send(at, mbarrier, rank, v); }
LIGER_DEVICE void bulk_copy(void* to, const void* from, int bytes, Mbarrier* mbarrier) { simt::bulk_copy(to, from, bytes, mbarrier); }
LIGER_DEVICE void finish_reads_before_copies() { simt::finish_reads_before_copies(); }
LIGER_DEVICE void async_copy(void* to, const void* from) { simt::async_copy(to, from); }
LIGER_DEVICE void close_copies() { simt::close_copies(); }
LIGER_DEVICE void wait_for_copies(int left) { simt::wait_for_copies(left); }
#endif
// The position of the highest set bit of v > 0.
LIGER_DEVICE int highest_bit(int v) { return 31 - __builtin_clz(unsigned(v)); }
LIGER_DEVICE void warp_barrier(source_location where = source_location::current()) { simt::warp_barrier(where); }
LIGER_DEVICE float shfl_xor(float v, int mask, source_location where = source_location::current()) {
  return bit_cast<float>(simt::shuffle_xor(bit_cast<uint32_t>(v), mask, where));
}
LIGER_DEVICE int shfl_xor(int v, int mask, source_location where = source_location::current()) {
  return int(simt::shuffle_xor(uint32_t(v), mask, where));
}
// Calls f(mask) for width / 2, width / 4 ... 1. `width` is a power of two, and need not be a compile-time constant.
template <class F> LIGER_DEVICE void for_masks_below(int width, const F& f) {
#pragma unroll 1
  for (int mask = width / 2; mask > 0; mask /= 2) f(mask);
}
LIGER_DEVICE float max_nan(float a, float b) { return a > b || a != a ? a : b; }
// As on GPUs, results below the normal range become 0.
LIGER_DEVICE float fast_exp2(float v) {
  const float out = exp2f(v);
  return out < 0x1p-126f ? 0 : out;
}
LIGER_DEVICE float fast_log2(float v) { return log2f(v); }
LIGER_DEVICE float fast_rsqrt(float v) { return 1 / sqrtf(v); }
LIGER_DEVICE float fast_reciprocal(float v) { return 1 / v; }
LIGER_DEVICE float rounded_product(float a, float b) { return a * b; }

LIGER_DEVICE int uniform(int v) { return v; }
LIGER_DEVICE int64_t uniform(int64_t v) { return v; }
LIGER_DEVICE bool is_elected_lane() { return lane_id() == 0; }
// Kernels run one after the other on the host target.
LIGER_DEVICE void let_next_kernel_start() {}
LIGER_DEVICE void wait_for_previous_kernel() {}

// Hints to the compiler of a GPU; without effect here.
template <class T> LIGER_DEVICE T* opaque(T* pointer) { return pointer; }
template <class Words> LIGER_DEVICE void forget(Words&) {}
template <class Words> LIGER_DEVICE void forget_in_ptxas(Words&) {}

template <int Bytes> LIGER_DEVICE void streaming_load(void* to, const void* from) {
  using Word [[gnu::vector_size(Bytes)]] = uint32_t;  // one access of this size and alignment
  *static_cast<Word*>(to) = *static_cast<const Word*>(from);
}
template <int Bytes> LIGER_DEVICE void in_place_load(void* to, const void* from) { streaming_load<Bytes>(to, from); }
template <int Bytes> LIGER_DEVICE void constant_load(void* to, const void* from) { streaming_load<Bytes>(to, from); }
template <int Bytes> LIGER_DEVICE void streaming_store(void* to, const void* from) { streaming_load<Bytes>(to, from); }

LIGER_DEVICE unsigned char* shared_memory() { return simt::shared_memory(); }
LIGER_DEVICE int atomic_claim(int* flag) { return simt::atomic_claim(flag); }
LIGER_DEVICE void publish_to_host() {}

[[noreturn]] void throw_unsupported_dtype();
[[noreturn]] void throw_launch_error(int code, const char* what);

template <class K> void launch(const launch::Launch& config, const typename K::Args& args, Stream) {
  const auto run = [](const void* a) { K::run(*static_cast<const typename K::Args*>(a)); };
  simt::run({simt::Registered<K>::index, K::max_threads, run, &args, sizeof(args)}, config);
}

}  // namespace liger::gpu
