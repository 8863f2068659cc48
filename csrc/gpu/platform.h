// The programming model of every GPU kernel, and the only door to CUDA and HIP: no kernel names a vendor's word.
//
// A kernel is  struct K { struct Args {plain data}; static constexpr int max_threads; static LIGER_DEVICE void run(const Args&); };
// and is started by launch<K>(plan, args, stream). Collectives need the whole warp and barriers the whole block: rows past the
// end are a `live` flag, never an early return, and loop trip counts are the same for all threads of a block.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/types.h"
#include "launch/plan.h"

#if defined(__HIPCC__) || defined(__HIP__)
#include "gpu/platform_hip.h"
#elif defined(__CUDACC__)
#include "gpu/platform_cuda.h"
#else
#error "csrc/gpu is compiled by a CUDA or a HIP compiler"
#endif

namespace liger::gpu {

// 16-bit floats are storage only; arithmetic is fp32, so that hardware without bf16 arithmetic runs the same code.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class T> constexpr Dtype dtype_of = std::is_same_v<T, float> ? Dtype::f32 : std::is_same_v<T, bf16> ? Dtype::bf16 : Dtype::f16;

LIGER_DEVICE inline float to_float(float v) { return v; }
LIGER_DEVICE inline float to_float(bf16 v) { return bit_cast<float>(uint32_t{v.bits} << 16); }
LIGER_DEVICE inline float to_float(f16 v) { return half_to_float(v.bits); }
template <class T>
LIGER_DEVICE inline T from_float(float v) {
  if constexpr (std::is_same_v<T, float>) return v;
  else if constexpr (std::is_same_v<T, bf16>) return bf16{float_to_bf16(v)};
  else return f16{float_to_half(v)};
}
template <class T> LIGER_DEVICE inline float round_to(float v) { return to_float(from_float<T>(v)); }

// N elements moved by one access of up to 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Vec {
  T data[N];
  LIGER_DEVICE T& operator[](int i) { return data[i]; }
  LIGER_DEVICE const T& operator[](int i) const { return data[i]; }
};

// keep: ordinary caching. stream: read or written once, should not push other data out of the L2. A template argument, since
// as an ordinary one the compiler was seen to drop it.
enum class Hint { keep, stream };

template <Hint H = Hint::keep, class T, int N>
LIGER_DEVICE inline void load(Vec<T, N>& out, const T* from) {
  if constexpr (H == Hint::stream && sizeof(Vec<T, N>) >= 4) streaming_load<sizeof(Vec<T, N>)>(&out, from);
  else out = *reinterpret_cast<const Vec<T, N>*>(from);
}
template <Hint H = Hint::keep, class T, int N>
LIGER_DEVICE inline void store(T* to, const Vec<T, N>& in) {
  if constexpr (H == Hint::stream && sizeof(Vec<T, N>) >= 4) streaming_store<sizeof(Vec<T, N>)>(to, &in);
  else *reinterpret_cast<Vec<T, N>*>(to) = in;
}

// N consecutive elements as floats, of a type known only at run time: parameters whose dtype differs from the activations'.
template <int N>
LIGER_DEVICE inline void load_any(float (&out)[N], const void* data, Dtype dtype, int64_t at) {
  auto read = [&](auto tag) {
    using T = decltype(tag);
    constexpr int step = sizeof(T) * N > 16 ? 16 / int(sizeof(T)) : N;
    const T* from = static_cast<const T*>(data) + at;
#pragma unroll
    for (int i = 0; i < N; i += step) {
      Vec<T, step> v;
      load(v, from + i);
#pragma unroll
      for (int j = 0; j < step; ++j) out[i + j] = to_float(v[j]);
    }
  };
  if (dtype == Dtype::f32) read(float{});
  else if (dtype == Dtype::bf16) read(bf16{});
  else read(f16{});
}
LIGER_DEVICE inline float load_one(const void* data, Dtype dtype, int64_t at) {
  float out[1];
  load_any<1>(out, data, dtype, at);
  return out[0];
}
LIGER_DEVICE inline void store_one(void* data, Dtype dtype, int64_t at, float value) {
  if (dtype == Dtype::f32) static_cast<float*>(data)[at] = value;
  else if (dtype == Dtype::bf16) static_cast<bf16*>(data)[at] = from_float<bf16>(value);
  else static_cast<f16*>(data)[at] = from_float<f16>(value);
}

// Reductions over `width` neighbouring lanes (a power of two, at most the warp); every lane gets the result.
LIGER_DEVICE inline float group_sum(float v, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) v += shfl_xor(v, mask);
  return v;
}
LIGER_DEVICE inline float group_max(float v, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) v = max_nan(v, shfl_xor(v, mask));
  return v;
}

// The block's dynamic shared memory, the only kind there is. On a GPU a plain pointer; the host target checks it.
template <class T> using Shared = T*;
template <class T>
LIGER_DEVICE inline Shared<T> shared(int byte_offset) { return reinterpret_cast<T*>(shared_memory() + byte_offset); }

// Calls f with a value of the element type that `dtype` names; fp64 has no GPU path.
template <class F>
void dispatch(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::f32: return f(float{});
    case Dtype::bf16: return f(bf16{});
    case Dtype::f16: return f(f16{});
    case Dtype::f64: break;
  }
  throw_unsupported_dtype();
}

// May 16-byte accesses be used for these rows? All rows start aligned and the row length is whole vectors.
inline bool aligned(const Rows& r, int64_t cols) {
  const int64_t n = 16 / size_of(r.dtype);
  return r.data == nullptr || (reinterpret_cast<uintptr_t>(r.data) % 16 == 0 && r.stride % n == 0 && cols % n == 0);
}
inline bool aligned(const MutableRows& r, int64_t cols) { return aligned(Rows{r.data, r.stride, r.dtype}, cols); }
inline bool aligned(const Vector& v, int64_t cols) { return aligned(Rows{v.data, 0, v.dtype}, cols); }

}  // namespace liger::gpu
