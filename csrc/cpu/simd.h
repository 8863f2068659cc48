// Vectors, conversions and loops for the CPU kernels: one source for every instruction set, by the compiler's vector
// extensions. Only files that are compiled once per instruction set (cmake/Cpu.cmake) include it. All definitions here are in that build's
// namespace, liger::cpu::LIGER_ISA: the linker would merge an inline function that two builds share, and the AVX-512 copy could run
// on a machine without AVX-512.
//
//   vec<Acc>                        lanes<Acc> values of the compute type Acc = float or double; + - * / ?: as on scalars
//   bf16, f16, float, double      element types in memory
//   row<T>(rows, i)               In<T> (Rows) or Out<T> (MutableRows): one row. T = any: the dtype is known at run time only
//   param<T>(vector)              In<T> of a Vector
//   load<Acc>(in, j, n)             elements j, j+1, … as vec<Acc>;   store(out, j, n, v)  rounds to the element type, once
//   columns<Acc>(cols, f)           calls f(j, n) for each vector of a row. n is Whole, or Part at the end: pass it on to load and
//                                 store. Lanes past the end are loaded as 0 and not stored
//   sum_columns<Acc, N>(cols, f)    N sums at once of the terms[N] that f(j, n, terms) computes; fixed order, in groups
//   max_columns<Acc>(cols, f)       the largest of all f(j, n); if some are NaN, the largest of only some of the others, or -inf
//   masked(n, v, other)           v in lanes before the end of the row, `other` in lanes past it
//   round_to(out, v), round_as<T>(v)   v after a store to `out` (as T) and a load
//   Math<Acc>                       exp, tanh, normal_cdf on vec<Acc>, for math/*.h; and scalar log, exp_scalar, sqrt
//   dispatch(dtype, f)            calls f(T{}); accumulator_type<T> is the compute type Acc of T
//   dispatch_same({dtypes…}, f)   calls f(T{}, Acc{}), with T = any when the dtypes differ
//   with_param<T>(vector, fill, f)   calls f(In<…>) for a parameter of dtype T or another dtype, or absent (all `fill`)
//   streams(out, rows, cols)      whether stores to `out` should bypass the caches. Pass it to row<T>(out, i, …), and end the
//                                 kernel with stream_fence()
//   prefetch(in, j)               prefetches the cache line of element j
//
// A kernel is a specialisation of  template <class Args> void run(const Args&, int64_t begin, int64_t end)  for its arguments'
// type (see cpu/dispatch.h). Mark the function with its loops [[gnu::flatten]], so that the lambdas in it are inlined.
#pragma once
#include "cpu/simd_types.h"

namespace liger::cpu {
int64_t last_level_cache_bytes();  // dispatch.cpp
}

namespace liger::cpu::LIGER_ISA {

template <class Args> void run(const Args& args, int64_t begin, int64_t end);

// ---- run-time element types -----------------------------------------------------------------------------------------------

template <class F> LIGER_INLINE decltype(auto) dispatch(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::bf16:
      return f(bf16{});
    case Dtype::f16:
      return f(f16{});
    case Dtype::f64:
      return f(double{});
    case Dtype::f32:
      break;
  }
  return f(float{});
}

// Selects code for several arrays at once: one dtype has its specialised code, mixed dtypes share a general version (T = any). Acc is the
// accumulator of the first dtype in the list.
template <int N, class F> LIGER_INLINE void dispatch_same(const Dtype (&dtypes)[N], F&& f) {
  const Dtype first = dtypes[0];
  bool same = true;
  for (const Dtype dtype : dtypes) same = same && dtype == first;
  if (same && first == Dtype::f32) f(float{}, float{});
  else if (same && first == Dtype::bf16) f(bf16{}, float{});
  else if (same && first == Dtype::f16) f(f16{}, float{});
  else if (same) f(double{}, double{});
  else if (first == Dtype::f64) f(any{}, double{});
  else f(any{}, float{});
}

// ---- rows in memory -------------------------------------------------------------------------------------------------------

struct Whole {};           // all lanes
struct Part {
  int n;
};    // the first n lanes

template <class T> struct In {
  const T* data;
};
template <> struct In<any> {
  const char* data;
  Dtype dtype;
};
template <> struct In<constant> {
  double value;
};
template <class T> struct Out {
  T* data;
  bool stream;
};
template <> struct Out<any> {
  char* data;
  Dtype dtype;
};

template <class T> LIGER_INLINE In<T> row(const Rows& rows, int64_t i) {
  if constexpr (std::is_same_v<T, any>)
    return {static_cast<const char*>(rows.data) + i * rows.stride * dtype_bytes(rows.dtype), rows.dtype};
  else return {static_cast<const T*>(rows.data) + i * rows.stride};
}
template <class T> LIGER_INLINE Out<T> row(const MutableRows& rows, int64_t i, bool stream = false) {
  if constexpr (std::is_same_v<T, any>) return {static_cast<char*>(rows.data) + i * rows.stride * dtype_bytes(rows.dtype), rows.dtype};
  else return {static_cast<T*>(rows.data) + i * rows.stride, stream};
}
template <class T> LIGER_INLINE In<T> param(const Vector& v) { return row<T>(Rows{v.data, 0, v.dtype}, 0); }
template <class T> LIGER_INLINE Out<T> param(const MutableVector& v) { return row<T>(MutableRows{v.data, 0, v.dtype}, 0); }

template <class Acc, class T, class N> LIGER_INLINE vec<Acc> load(const T* from, N n) {
  using V = vector<bits_type<T>, lanes<Acc>>;
  if constexpr (std::is_same_v<N, Whole>) return decode<Acc, T>(load_bytes<V>(from));
  else {
    V v{};
    __builtin_memcpy(&v, from, static_cast<size_t>(n.n) * sizeof(T));
    return decode<Acc, T>(v);
  }
}
template <class Acc, class T, class N> LIGER_INLINE vec<Acc> load(const In<T>& in, int64_t j, N n) {
  if constexpr (std::is_same_v<T, constant>) return splat<Acc>(Acc(in.value));
  else if constexpr (std::is_same_v<T, any>)
    return dispatch(in.dtype, [&](auto t) { return load<Acc>(reinterpret_cast<const decltype(t)*>(in.data) + j, n); });
  else return load<Acc>(in.data + j, n);
}

// A store that bypasses the caches on x86; `to` must be aligned to the vector's size.
template <class V> LIGER_INLINE void stream_bytes(void* to, V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), bit_cast<__m512i>(v));
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(to), bit_cast<__m256i>(v));
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 16) return _mm_stream_si128(static_cast<__m128i*>(to), bit_cast<__m128i>(v));
  if constexpr (sizeof(V) == 8) return _mm_stream_si64(static_cast<long long*>(to), bit_cast<long long>(v));
#endif
  __builtin_memcpy(to, &v, sizeof(V));
}
LIGER_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class Acc, class T, class N> LIGER_INLINE void store(T* to, N n, vec<Acc> v) {
  const auto bits = encode<Acc, T>(v);
  if constexpr (std::is_same_v<N, Whole>) __builtin_memcpy(to, &bits, sizeof(bits));
  else __builtin_memcpy(to, &bits, static_cast<size_t>(n.n) * sizeof(T));
}
template <class Acc, class T, class N> LIGER_INLINE void store_as(const Out<T>& out, int64_t j, N n, vec<Acc> v) {
  if constexpr (std::is_same_v<T, any>)
    dispatch(out.dtype, [&](auto t) { store<Acc>(reinterpret_cast<decltype(t)*>(out.data) + j, n, v); });
  else if constexpr (std::is_same_v<N, Whole>) {
    if (out.stream) stream_bytes(out.data + j, encode<Acc, T>(v));
    else store<Acc>(out.data + j, n, v);
  } else store<Acc>(out.data + j, n, v);
}
template <class T, class N> LIGER_INLINE void store(const Out<T>& out, int64_t j, N n, vec<float> v) { store_as<float>(out, j, n, v); }
template <class T, class N> LIGER_INLINE void store(const Out<T>& out, int64_t j, N n, vec<double> v) { store_as<double>(out, j, n, v); }

// Stores past the caches are faster if the output does not fit the caches. Every whole vector has to be aligned.
LIGER_INLINE bool streams(const MutableRows& out, int64_t rows, int64_t cols) {
  const int64_t element = dtype_bytes(out.dtype);
  return rows * cols * element > last_level_cache_bytes() && reinterpret_cast<uintptr_t>(out.data) % vector_bytes == 0 &&
         (rows == 1 || out.stride * element % vector_bytes == 0);
}

template <class T> LIGER_INLINE void prefetch(const In<T>& in, int64_t j) {
  if constexpr (!std::is_same_v<T, any> && !std::is_same_v<T, constant>) __builtin_prefetch(in.data + j);
}

// v after a store as T and a load; for T = any, as the dtype at run time.
template <class T, class Acc> LIGER_INLINE vec<Acc> round_as(vec<Acc> v) {
  if constexpr (std::is_same_v<T, bf16> && std::is_same_v<Acc, float>)
    return bit_cast<vec<Acc>>(round_upper_half<lanes<Acc>>(v) & 0xffff0000u);
  else return decode<Acc, T>(encode<Acc, T>(v));
}
template <class Acc, class T> LIGER_INLINE vec<Acc> round_to(const Out<T>& like, vec<Acc> v) {
  if constexpr (std::is_same_v<T, any>) return dispatch(like.dtype, [&](auto t) { return round_as<decltype(t), Acc>(v); });
  else return round_as<T, Acc>(v);
}

template <class T, class F> LIGER_INLINE void with_param(const Vector& v, double fill, F&& f) {
  if (v.data == nullptr) return f(In<constant>{fill});
  if constexpr (!std::is_same_v<T, any>)
    if (v.dtype == dtype_constant<T>) return f(param<T>(v));
  f(param<any>(v));
}

// ---- loops and reductions -------------------------------------------------------------------------------------------------

template <class Acc, class F> LIGER_INLINE void columns(int64_t begin, int64_t end, F&& f) {
  int64_t j = begin;
  for (; j + lanes<Acc> <= end; j += lanes<Acc>) f(j, Whole{});
  if (j < end) f(j, Part{int(end - j)});
}
template <class Acc, class F> LIGER_INLINE void columns(int64_t cols, F&& f) { columns<Acc>(0, cols, f); }

template <class Acc> LIGER_INLINE vec<Acc> masked(Whole, vec<Acc> v, Acc) { return v; }
template <class Acc> LIGER_INLINE vec<Acc> masked(Part n, vec<Acc> v, Acc other) {
  for (int i = 0; i < lanes<Acc>; ++i) v[i] = i < n.n ? v[i] : other;
  return v;
}

// Return a < b ? a : b and a > b ? a : b, so b if either is NaN. x86 has instructions with this rule; compilers do not use them.
LIGER_INLINE vec<float> lesser(vec<float> a, vec<float> b) {
#if defined(__AVX512F__)
  return bit_cast<vec<float>>(_mm512_min_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#elif defined(__AVX2__)
  return bit_cast<vec<float>>(_mm256_min_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
#else
  return a < b ? a : b;
#endif
}
LIGER_INLINE vec<float> greater(vec<float> a, vec<float> b) {
#if defined(__AVX512F__)
  return bit_cast<vec<float>>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#elif defined(__AVX2__)
  return bit_cast<vec<float>>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

// Combines the lanes of one vector, by halves.
template <class Acc, int N, class F> LIGER_INLINE Acc fold(vector<Acc, N> v, F combine) {
  if constexpr (N == 1) return v[0];
  else {
    vector<Acc, N / 2> half[2];
    __builtin_memcpy(half, &v, sizeof(v));
    return fold<Acc, N / 2>(combine(half[0], half[1]), combine);
  }
}
struct Add {
  template <class V> LIGER_INLINE V operator()(V a, V b) const { return a + b; }
};
struct Max {
  template <class V> LIGER_INLINE V operator()(V a, V b) const {
    if constexpr (std::is_same_v<V, vec<float>>) return greater(b, a);
    else return b > a ? b : a;
  }
};

template <class Acc, int N> struct Results {
  Acc value[N];
  LIGER_INLINE Acc operator[](int i) const { return value[i]; }
};

// Combines the terms that f(j, n, vec<Acc> (&terms)[N]) computes; lanes past the end of the row are set to `neutral` here. Four chains hide
// the latency of an addition. They are folded into the total every 128 vectors, so that rounding errors grow with the number of those
// groups plus their length, not with the length of the row.
template <class Acc, int N, class Combine, class F>
LIGER_INLINE Results<Acc, N> reduce_columns(int64_t cols, Acc neutral, Combine combine, F&& f) {
  constexpr int64_t chains = 4, step = chains * lanes<Acc>, group = 32 * step;
  vec<Acc> total[N];
  for (auto& v : total) v = splat<Acc>(neutral);
  int64_t j = 0;
  while (j + step <= cols) {
    const int64_t end = j + group < cols ? j + group : cols;
    vec<Acc> chain[chains][N];
    for (int c = 0; c < chains; ++c) f(j + c * lanes<Acc>, Whole{}, chain[c]);
    for (j += step; j + step <= end; j += step)
      for (int c = 0; c < chains; ++c) {
        vec<Acc> terms[N];
        f(j + c * lanes<Acc>, Whole{}, terms);
        for (int i = 0; i < N; ++i) chain[c][i] = combine(chain[c][i], terms[i]);
      }
    for (int i = 0; i < N; ++i) total[i] = combine(total[i], combine(combine(chain[0][i], chain[1][i]), combine(chain[2][i], chain[3][i])));
  }
  columns<Acc>(j, cols, [&](int64_t at, auto n) {
    vec<Acc> terms[N];
    f(at, n, terms);
    for (int i = 0; i < N; ++i) total[i] = combine(total[i], masked<Acc>(n, terms[i], neutral));
  });
  Results<Acc, N> out;
  for (int i = 0; i < N; ++i) out.value[i] = fold<Acc, lanes<Acc>>(total[i], combine);
  return out;
}
template <class Acc, int N, class F> LIGER_INLINE Results<Acc, N> sum_columns(int64_t cols, F&& f) {
  return reduce_columns<Acc, N>(cols, Acc(0), Add{}, f);
}
// f(j, n) returns one vector.
template <class Acc, class F> LIGER_INLINE Acc sum_columns(int64_t cols, F&& f) {
  return reduce_columns<Acc, 1>(cols, Acc(0), Add{}, [&](int64_t j, auto n, vec<Acc>(&terms)[1]) { terms[0] = f(j, n); })[0];
}
template <class Acc, class F> LIGER_INLINE Acc max_columns(int64_t cols, F&& f) {
  return reduce_columns<Acc, 1>(cols, -Acc(__builtin_inf()), Max{}, [&](int64_t j, auto n, vec<Acc>(&terms)[1]) { terms[0] = f(j, n); })[0];
}

}  // namespace liger::cpu::LIGER_ISA

#include "cpu/simd_math.h"
