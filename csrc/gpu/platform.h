// The programming model of every GPU kernel. One kernel source compiles for CUDA, for HIP and for the host target, because kernels use the
// names of this file and none of CUDA's or HIP's. platform_cuda.h, platform_hip.h and platform_host.h implement the names.
//
// A kernel is a struct,
//   struct K { struct Args {plain data}; static constexpr int max_threads; static LIGER_DEVICE void run(const Args&); };
// and launch<K>(config, args, stream) launches it as `config`, a launch::Launch (launch/launch.h), describes. All lanes of a warp must
// reach its collectives, and all threads of a block its barriers. So a thread whose row lies past the end clears a `live` flag and does not
// return before the last of them, and loops that contain collectives have the same trip count in all threads that meet there.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/aligned.h"
#include "kernels/types.h"
#include "launch/launch.h"

#if defined(__HIPCC__) || defined(__HIP__)
#include "gpu/platform_hip.h"
#elif defined(__CUDACC__)
#include "gpu/platform_cuda.h"
#else  // any other C++ compiler: the host target, for tests
#include "gpu/platform_host.h"
#endif

namespace liger::gpu {

#if !defined(LIGER_HAS_CLUSTERS)
// Stubs for targets without clusters and bulk copies: code that uses them never runs there, but has to compile. An Mbarrier (PTX's
// mbarrier; platform_cuda.h) counts, in shared memory, the bytes that messages and bulk copies have brought.
constexpr bool has_bulk_copies = false;
using Mbarrier = uint64_t;
LIGER_DEVICE void cluster_arrive() {}
LIGER_DEVICE void cluster_wait() {}
LIGER_DEVICE void init_mbarrier(Mbarrier*) {}
LIGER_DEVICE void expect_bytes(Mbarrier*, int) {}
LIGER_DEVICE void wait_for_phase(Mbarrier*, int) {}
LIGER_DEVICE void send(float*, Mbarrier*, int, float) {}
LIGER_DEVICE void bulk_copy(void*, const void*, int, Mbarrier*) {}
LIGER_DEVICE void finish_reads_before_copies() {}
#endif

#if !defined(LIGER_HAS_ASYNC_COPIES)
constexpr bool has_async_copies = false;
LIGER_DEVICE void async_copy(void*, const void*) {}
LIGER_DEVICE void close_copies() {}
LIGER_DEVICE void wait_for_copies(int) {}
#endif

// 16-bit floats are storage only; arithmetic is fp32, so that hardware without bf16 arithmetic runs the same code. (Exceptions: largest()
// and products() use 16-bit instructions where the hardware has them, with the same results.)
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class T>
constexpr Dtype dtype_constant = std::is_same_v<T, float>  ? Dtype::f32
                                 : std::is_same_v<T, bf16> ? Dtype::bf16
                                                           : Dtype::f16;

LIGER_DEVICE float to_float(float v) { return v; }
LIGER_DEVICE float to_float(bf16 v) { return bit_cast<float>(uint32_t{v.bits} << 16); }
LIGER_DEVICE float to_float(f16 v) { return half_to_float(v.bits); }
// Always inlined: gcc does not report a store to the host target if its value is the result of a call.
template <class T> [[gnu::always_inline]] LIGER_DEVICE T from_float(float v) {
  if constexpr (std::is_same_v<T, float>) return v;
  else if constexpr (std::is_same_v<T, bf16>) return bf16{float_to_bf16(v)};
  else return f16{float_to_half(v)};
}
template <class T> LIGER_DEVICE float round_to(float v) { return to_float(from_float<T>(v)); }

// N elements in memory order, accessed one by one. In registers a 16-bit element takes a whole register: use Packed for values that live
// long.
template <class T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Vec {
  T data[N];
  LIGER_DEVICE T& operator[](int i) { return data[i]; }
  LIGER_DEVICE const T& operator[](int i) const { return data[i]; }
};

// N elements as they lie in memory, two 16-bit elements per register; the operator [] widens an element to fp32.
template <class T, int N> struct Packed {
  static constexpr int elements = N, bytes = N * int(sizeof(T));
  using Word = std::conditional_t<bytes % 4 == 0, uint32_t, uint16_t>;
  static constexpr int words = bytes / int(sizeof(Word)), elements_per_word = int(sizeof(Word) / sizeof(T));
  alignas(bytes > 16 ? 16 : bytes) Word data[words];

  LIGER_DEVICE float operator[](int i) const {
    const Word word = data[i / elements_per_word];
    if constexpr (std::is_same_v<T, float>) return bit_cast<float>(word);
    else if constexpr (sizeof(Word) == 2) return to_float(T{word});
    else if constexpr (std::is_same_v<T, bf16>) return bit_cast<float>(i % 2 ? word & 0xffff0000u : word << 16);
    else return to_float(T{uint16_t(i % 2 ? word >> 16 : word)});
  }
  LIGER_DEVICE void negate() {
    constexpr uint32_t signs = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
#pragma unroll
    for (int w = 0; w < words; ++w) data[w] ^= Word(signs);
  }
  LIGER_DEVICE void set(const float (&values)[N]) {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      if constexpr (std::is_same_v<T, float>) data[w] = bit_cast<uint32_t>(values[w]);
      else if constexpr (sizeof(Word) == 2) data[w] = from_float<T>(values[w]).bits;
      else if constexpr (std::is_same_v<T, bf16>) data[w] = floats_to_bf16s(values[2 * w], values[2 * w + 1]);
      else data[w] = floats_to_halves(values[2 * w], values[2 * w + 1]);
    }
  }
};

LIGER_DEVICE float minus_infinity() { return bit_cast<float>(0xff800000u); }
// A vector of the type of `in`, all of whose elements are `value`.
template <class T, int N> LIGER_DEVICE Packed<T, N> same_value(Packed<T, N> in, float value) {
  float values[N];
#pragma unroll
  for (int j = 0; j < N; ++j) values[j] = value;
  in.set(values);
  return in;
}

// A vector of -inf as a constant, without a conversion.
template <class T, int N> LIGER_DEVICE Packed<T, N> minus_infinities() {
  using Word = typename Packed<T, N>::Word;
  Packed<T, N> out;
  for (Word& word : out.data) word = Word(sizeof(T) == 4 ? 0xff800000u : std::is_same_v<T, bf16> ? 0xff80ff80u : 0xfc00fc00u);
  return out;
}

// Whether one instruction compares or multiplies two pairs of 16-bit values. Otherwise a maximum widens all values to fp32, and a compiler
// that keeps the widened values runs out of registers.
#if defined(LIGER_HAS_PAIRS)
constexpr bool has_pairs = true;
#else
constexpr bool has_pairs = false;
#endif

// Returns the largest element of the vectors k for which has(k) is true. Ignores NaN.
template <class T, int N, int K, class F> LIGER_DEVICE float largest(const Packed<T, N> (&x)[K], F has) {
#if defined(LIGER_HAS_PAIRS)
  if constexpr (sizeof(T) == 2 && N > 1) {
    constexpr bool is_bf16 = std::is_same_v<T, bf16>;
    uint32_t most = minus_infinities<T, 2>().data[0];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (has(k))
#pragma unroll
        for (int w = 0; w < N / 2; ++w) most = is_bf16 ? bf16_maxima(most, x[k].data[w]) : half_maxima(most, x[k].data[w]);
    const Packed<T, 2> pair{{most}};
    return fmaxf(pair[0], pair[1]);
  }
#endif
  float most = minus_infinity();
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (has(k))
#pragma unroll
      for (int i = 0; i < N; ++i) most = fmaxf(most, x[k][i]);
  return most;
}

// Returns the elementwise products of two vectors, each rounded once: in fp32 the product of 16-bit values is exact, beside underflow.
template <class T, int N> LIGER_DEVICE Packed<T, N> products(const Packed<T, N>& a, const Packed<T, N>& b) {
  Packed<T, N> out;
#if defined(LIGER_HAS_PAIRS)
  if constexpr (sizeof(T) == 2 && N > 1) {
#pragma unroll
    for (int w = 0; w < N / 2; ++w)
      out.data[w] = std::is_same_v<T, bf16> ? bf16_products(a.data[w], b.data[w]) : half_products(a.data[w], b.data[w]);
  } else
#endif
  {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = a[i] * b[i];
    out.set(values);
  }
  return out;
}

// How a kernel accesses memory, as a hint for the caches.
//   keep      ordinary caching
//   stream    read or written once. On AMD these are non-temporal accesses. On NVIDIA cache hints made kernels slower (platform_cuda.h):
//             loads are those of `constant`, and stores are ordinary
//   in_place  a load of data that is used once, from memory that this kernel also writes
//   constant  read by all blocks and written by none
// stream and constant loads are only for memory that nobody writes while the kernel runs, not even the loading thread itself after its
// load: the GPU may read it through a path that does not see stores. The hint is a template argument because the compiler dropped it
// otherwise.
enum class Hint { keep, stream, in_place, constant };

// Load or store a Vec or Packed. Hints apply to accesses of 4 to 16 bytes; a larger vector takes several accesses of 16 bytes.
template <Hint H = Hint::keep, class V, class T> LIGER_DEVICE void load(V& out, const T* from) {
  constexpr int bytes = sizeof(V), step = bytes < 16 ? bytes : 16;
  if constexpr (H != Hint::keep && step >= 4) {
#pragma unroll
    for (int at = 0; at < bytes; at += step) {
      char* const to = reinterpret_cast<char*>(&out) + at;
      const char* const source = reinterpret_cast<const char*>(from) + at;
      if constexpr (H == Hint::stream) streaming_load<step>(to, source);
      else if constexpr (H == Hint::in_place) in_place_load<step>(to, source);
      else constant_load<step>(to, source);
    }
  } else {
    out = *reinterpret_cast<const V*>(from);
  }
}
template <Hint H = Hint::keep, class V, class T> LIGER_DEVICE void store(T* to, const V& in) {
  constexpr int bytes = sizeof(V), step = bytes < 16 ? bytes : 16;
  if constexpr (H == Hint::stream && step >= 4) {
#pragma unroll
    for (int at = 0; at < bytes; at += step)
      streaming_store<step>(reinterpret_cast<char*>(to) + at, reinterpret_cast<const char*>(&in) + at);
  } else {
    *reinterpret_cast<V*>(to) = in;
  }
}

// Copies a vector to shared memory; one of 16 bytes without a register, on devices with asynchronous copies. This thread may read the copy
// after it has closed its copies and waited for them (close_copies, wait_for_copies).
template <Hint H = Hint::stream, class V, class T> LIGER_DEVICE void copy_to_shared(V* to, const T* from) {
  if constexpr (has_async_copies && sizeof(V) == 16) async_copy(to, from);
  else load<H>(*to, from);
}

// Calls f with a value of the element type that `dtype` names (in device code; fp64 has no GPU path). Before any lambda of its own f must
// derive the type: `using T = std::remove_cvref_t<decltype(tag)>`. Inside of such a lambda nvcc's host pass takes decltype(tag) for float&,
// and instantiates a kernel of another name than the registered one ("invalid resource handle" at the launch).
template <class F> LIGER_DEVICE void with_dtype(Dtype dtype, F&& f) {
  if (dtype == Dtype::f32) f(float{});
  else if (dtype == Dtype::bf16) f(bf16{});
  else f(f16{});
}

// Loads N consecutive elements as floats, of a type known only at run time: parameters, whose dtype may differ from the activations'.
template <int N, Hint H = Hint::keep> LIGER_DEVICE void load_any(float (&out)[N], const void* data, Dtype dtype, int64_t at) {
  with_dtype(dtype, [&](auto tag) {
    using T = std::remove_cvref_t<decltype(tag)>;
    Vec<T, N> v;
    load<H>(v, static_cast<const T*>(data) + at);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(v[i]);
  });
}
LIGER_DEVICE float load_one(const void* data, Dtype dtype, int64_t at) {
  float out[1];
  load_any<1>(out, data, dtype, at);
  return out[0];
}
LIGER_DEVICE void store_one(void* data, Dtype dtype, int64_t at, float value) {
  with_dtype(dtype, [&](auto tag) { static_cast<decltype(tag)*>(data)[at] = from_float<decltype(tag)>(value); });
}

constexpr float log2_e = 1.4426950408889634f;
// exp(v) with an error of about 2 + |v| units in the last place; results below the normal range become 0.
LIGER_DEVICE float fast_exp(float v) { return fast_exp2(v * log2_e); }
// A sum that is nearly as exact as if it were rounded once, at its end: it also sums the rounding error of each addition (Knuth's two-sum).
struct ExactSum {
  float v[2] = {};  // the sum, and the sum of the rounding errors
  LIGER_DEVICE void add(float value) { join(v, {value, 0}); }
  // If the sum is infinite, the error is NaN and is ignored.
  LIGER_DEVICE float total() const { return v[1] == v[1] ? v[0] + v[1] : v[0]; }
  static LIGER_DEVICE void join(float (&a)[2], const float (&b)[2]) {
    const float sum = a[0] + b[0], rounded_b = sum - a[0];
    a[1] += b[1] + (a[0] - (sum - rounded_b)) + (b[0] - rounded_b);
    a[0] = sum;
  }
};
// exp(v), as exact as a result of type T requires: for 16-bit types an error of |v| units in the last place of fp32 does not matter.
// Results below the normal range of fp32 may become 0.
template <class T> LIGER_DEVICE float exp_as(float v) {
  if constexpr (std::is_same_v<T, float>) return expf(v);
  else return fast_exp(v);
}

// a / b for a >= 0, b > 0. Operands of 32 bits, the usual case, take a fraction of the instructions.
LIGER_DEVICE int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return uint32_t(a) / uint32_t(b);
  return a / b;
}

// Computes n / d for 0 <= n < 2^31 by a multiplication. The host constructs it, and a kernel receives it in its arguments.
struct Divisor {
  uint32_t d, shift = 31, multiplier;
  explicit Divisor(int64_t divisor) : d(uint32_t(divisor)) {
    while (int64_t{1} << (shift - 31) < divisor) ++shift;
    multiplier = uint32_t(((uint64_t{1} << shift) + d - 1) / d);
  }
  LIGER_DEVICE int operator()(int n) const { return int(uint64_t{uint32_t(n)} * multiplier >> shift); }
};

// The block's dynamic shared memory from a byte offset on. Kernels have no static shared memory.
template <class T> using Shared = T*;
template <class T> LIGER_DEVICE Shared<T> shared(int byte_offset) { return reinterpret_cast<T*>(shared_memory() + byte_offset); }

LIGER_DEVICE double shfl_xor(double v, int mask) {
  const auto bits = bit_cast<uint64_t>(v);
  const uint32_t low = uint32_t(shfl_xor(int(uint32_t(bits)), mask)), high = uint32_t(shfl_xor(int(uint32_t(bits >> 32)), mask));
  return bit_cast<double>(uint64_t{high} << 32 | low);
}

// Calls f with a value of the element type that `dtype` names; fp64 has no GPU path.
template <class F> void dispatch(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::f32:
      return f(float{});
    case Dtype::bf16:
      return f(bf16{});
    case Dtype::f16:
      return f(f16{});
    case Dtype::f64:
      break;
  }
  throw_unsupported_dtype();
}

using launch::Instance;
using launch::with_instance;
// Returns whether this instance is compiled for the element type T: its accesses must have one element, or 16 bytes. Instances that load
// rows ahead (Instance::ahead) are compiled only where devices may have clusters.
template <class T> constexpr bool fits(const launch::Instance& instance) {
  return (instance.vec == 1 || instance.vec * int(sizeof(T)) == 16) && (may_have_clusters || !instance.ahead);
}

}  // namespace liger::gpu
