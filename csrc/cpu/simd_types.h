// Vector types of the build's instruction set, element types in memory, and the conversions between them. Part of cpu/simd.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LIGER_INLINE __attribute__((always_inline)) inline

namespace liger::cpu::LIGER_ISA {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif

template <class T, int N> struct VectorType {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N> using vector = typename VectorType<T, N>::type;

template <class Acc> constexpr int lanes = vector_bytes / int(sizeof(Acc));
template <class Acc> using vec = vector<Acc, lanes<Acc>>;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct any {};       // an element type known at run time only
struct constant {};  // no memory at all: every element is one value

template <class T>
constexpr Dtype dtype_constant = std::is_same_v<T, float>  ? Dtype::f32
                                 : std::is_same_v<T, bf16> ? Dtype::bf16
                                 : std::is_same_v<T, f16>  ? Dtype::f16
                                                           : Dtype::f64;
template <class T> using accumulator_type = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class To, class From> LIGER_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
template <class V> LIGER_INLINE V load_bytes(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}
template <class Acc> LIGER_INLINE vec<Acc> splat(Acc value) { return vec<Acc>{} + value; }
// Returns x, and keeps gcc (12 or newer) from contracting the product that computed x and a later sum or difference into a multiply-add.
// (clang contracts within one expression only, so it needs no barrier.)
template <class V> LIGER_INLINE V rounded(V x) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(x);
#else
  return x;
#endif
}

// Convert 16 to 32 bits and back; the values must fit 16 bits. Compilers emit several instructions where the CPU has one.
template <int N> LIGER_INLINE vector<uint32_t, N> widen(vector<uint16_t, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return bit_cast<vector<uint32_t, N>>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(v)));
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) return bit_cast<vector<uint32_t, N>>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(v)));
#endif
  return __builtin_convertvector(v, vector<uint32_t, N>);
}
template <int N> LIGER_INLINE vector<uint16_t, N> narrow(vector<uint32_t, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return bit_cast<vector<uint16_t, N>>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(v)));
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {
    const __m256i whole = bit_cast<__m256i>(v);
    return bit_cast<vector<uint16_t, N>>(_mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
  }
#endif
  return __builtin_convertvector(v, vector<uint16_t, N>);
}

template <int N> LIGER_INLINE vector<float, N> bf16_to_float(vector<uint16_t, N> v) {
  return bit_cast<vector<float, N>>(widen<N>(v) << 16);
}
// The upper 16 bits of the result are v rounded to nearest even; a NaN becomes a quiet NaN.
template <int N> LIGER_INLINE vector<uint32_t, N> round_upper_half(vector<float, N> v) {
  using U = vector<uint32_t, N>;
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    const __m512i u = bit_cast<__m512i>(v);
    const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    const __mmask16 nan = _mm512_cmp_ps_mask(bit_cast<__m512>(v), bit_cast<__m512>(v), _CMP_UNORD_Q);
    const __m512i even = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_mask_add_epi32(even, odd, u, _mm512_set1_epi32(0x8000));
    return bit_cast<U>(_mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000)));
  }
#endif
  const U u = bit_cast<U>(v);
  const U rounded = u + 0x7fffu + ((u >> 16) & 1u), quiet = u | 0x400000u;
  return v == v ? rounded : quiet;
}
template <int N> LIGER_INLINE vector<uint16_t, N> float_to_bf16(vector<float, N> v) { return narrow<N>(round_upper_half<N>(v) >> 16); }

template <int N> LIGER_INLINE vector<float, N> half_to_float(vector<uint16_t, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return bit_cast<vector<float, N>>(_mm512_cvtph_ps(bit_cast<__m256i>(v)));
#endif
#if defined(__F16C__)
  if constexpr (N == 8) return bit_cast<vector<float, N>>(_mm256_cvtph_ps(bit_cast<__m128i>(v)));
  if constexpr (N == 4) return bit_cast<vector<float, N>>(_mm_cvtph_ps(_mm_cvtsi64_si128(bit_cast<int64_t>(v))));
#endif
  using U = vector<uint32_t, N>;
  using I = vector<int32_t, N>;
  const U h = widen<N>(v), magnitude = h & 0x7fffu;
  const U normal = (magnitude << 13) + (112u << 23), special = (magnitude << 13) + (224u << 23);
  const U subnormal = bit_cast<U>(__builtin_convertvector(bit_cast<I>(magnitude), vector<float, N>) * 0x1p-24f);
  const U bits = magnitude >= 0x7c00u ? special : magnitude < 0x400u ? subnormal : normal;
  return bit_cast<vector<float, N>>(bits | ((h & 0x8000u) << 16));
}
template <int N> LIGER_INLINE vector<uint16_t, N> float_to_half(vector<float, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return bit_cast<vector<uint16_t, N>>(_mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
  if constexpr (N == 8) return bit_cast<vector<uint16_t, N>>(_mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  if constexpr (N == 4)
    return bit_cast<vector<uint16_t, N>>(_mm_cvtsi128_si64(_mm_cvtps_ph(bit_cast<__m128>(v), _MM_FROUND_TO_NEAREST_INT)));
#endif
  using U = vector<uint32_t, N>;
  const U u = bit_cast<U>(v), magnitude = u & 0x7fffffffu;
  const U rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  const U normal = (rounded - (112u << 23)) >> 13;
  // Adding 0.5 leaves the half's subnormal bits, rounded to nearest even, at the end of the sum's mantissa.
  const U subnormal = bit_cast<U>(bit_cast<vector<float, N>>(magnitude) + 0.5f) - 0x3f000000u;
  const U nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  const U infinity = U{} + 0x7c00u;
  const U bits = magnitude > 0x7f800000u ? nan : rounded >= 0x47800000u ? infinity : magnitude < 0x38800000u ? subnormal : normal;
  return narrow<N>(bits | ((u >> 16) & 0x8000u));
}

// Element type T in memory: its bits as a vector, and the conversions from and to Acc.
template <class T> using bits_type = std::conditional_t<sizeof(T) == 2, uint16_t, T>;
template <class Acc, class T> LIGER_INLINE vec<Acc> decode(vector<bits_type<T>, lanes<Acc>> v) {
  constexpr int N = lanes<Acc>;
  if constexpr (std::is_same_v<T, Acc>) return v;
  else if constexpr (std::is_same_v<T, bf16>) return __builtin_convertvector(bf16_to_float<N>(v), vec<Acc>);
  else if constexpr (std::is_same_v<T, f16>) return __builtin_convertvector(half_to_float<N>(v), vec<Acc>);
  else return __builtin_convertvector(v, vec<Acc>);
}
template <class Acc, class T> LIGER_INLINE vector<bits_type<T>, lanes<Acc>> encode(vec<Acc> v) {
  constexpr int N = lanes<Acc>;
  if constexpr (std::is_same_v<T, Acc>) return v;
  else if constexpr (std::is_same_v<T, bf16>) return float_to_bf16<N>(__builtin_convertvector(v, vector<float, N>));
  else if constexpr (std::is_same_v<T, f16>) return float_to_half<N>(__builtin_convertvector(v, vector<float, N>));
  else return __builtin_convertvector(v, vector<T, N>);
}

}  // namespace liger::cpu::LIGER_ISA
