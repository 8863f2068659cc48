// The types of all kernels' arguments: element types, matrices, vectors, the stream. Plain C++, no torch, no CUDA.
//
// A kernel header describes the arguments of its ops as structs of pointers, sizes and scalars. It declares the functions that a backend
// implements in namespace liger::LIGER_BACKEND. The build sets this name: cpu, gpu, trace (csrc/trace), or python for code without kernels.
// Strides are in elements.
#pragma once
#include <cstdint>
#include <type_traits>

#ifndef LIGER_BACKEND
#error "LIGER_BACKEND is not defined: the build sets it to cpu, gpu, trace or python"
#endif

namespace liger {

enum class Dtype : int32_t { f32, bf16, f16, f64 };

constexpr int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// Statistics and accumulators: fp32, and fp64 for fp64 tensors.
constexpr Dtype accumulator(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

// torch.promote_types for the floating-point types: bf16 with f16 yields f32.
constexpr Dtype promote(Dtype a, Dtype b) { return a == b ? a : a == Dtype::f64 || b == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

// The address of the element `elements` behind data; null for null.
template <class Data> Data* at(Data* data, int64_t elements, Dtype dtype) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  return data ? static_cast<Byte*>(data) + elements * dtype_bytes(dtype) : nullptr;
}

// The stream on which kernels are launched. The CPU ignores it.
struct Stream {
  int device = 0;
  void* handle = nullptr;
};

// A matrix of rows whose columns are contiguous; `stride` elements from one row to the next.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;
  Dtype dtype = Dtype::f32;
};
struct MutableRows {
  void* data = nullptr;
  int64_t stride = 0;
  Dtype dtype = Dtype::f32;
};

// A vector of parameters (weight, bias, cos table row …); data == nullptr: absent.
struct Vector {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
};
struct MutableVector {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
};

}  // namespace liger
