// The matrix library's words for gemm.cu: cuBLAS or hipBLAS. Neither header nor library is needed to build: the functions are
// looked up in the library that torch has loaded, through prototypes of their C interface.
#pragma once
#include <array>
#include <cstdint>

#include "gpu/platform.h"

namespace liger::gpu::blas {

using Handle = void*;
// Index: int, or int64_t in the interface for large matrices. Column-major; enumerations are ints of the C interface.
template <class Index>
using GemmEx = int (*)(Handle, int transa, int transb, Index m, Index n, Index k, const void* alpha, const void* a, int a_type, Index lda,
                       const void* b, int b_type, Index ldb, const void* beta, void* c, int c_type, Index ldc, int compute, int algorithm);
using GetPointerMode = int (*)(Handle, int* mode);
using SetPointerMode = int (*)(Handle, int mode);
using GetMathMode = int (*)(Handle, int* mode);
using SetMathMode = int (*)(Handle, int mode);

enum PointerMode { host = 0, device = 1 };
// Added to a math mode: parts of a sum of 16-bit products must not be added up in 16 bits.
constexpr int no_reduced_precision = 16;
constexpr int real_f32 = 0, real_f16 = 2, real_bf16 = 14;

// Names are tried in this order.
#if defined(__HIPCC__) || defined(__HIP__)
constexpr const char* library = "hipBLAS";
constexpr int normal = 111, transpose = 112, compute_f32 = 2, default_algorithm = 160;
// hipBLAS 2 has this interface under _v2, hipBLAS 3 under the plain name.
constexpr const char* gemm_names[] = {"hipblasGemmEx_v2", "hipblasGemmEx"};
constexpr const char* gemm_64_names[] = {"hipblasGemmEx_v2_64", "hipblasGemmEx_64"};
constexpr const char* get_pointer_mode_names[] = {"hipblasGetPointerMode"};
constexpr const char* set_pointer_mode_names[] = {"hipblasSetPointerMode"};
// Sums are in fp32, whatever the mode.
constexpr std::array<const char*, 0> get_math_mode_names, set_math_mode_names;
#else
constexpr const char* library = "cuBLAS";
constexpr int normal = 0, transpose = 1, compute_f32 = 68, default_algorithm = -1;
constexpr const char* gemm_names[] = {"cublasGemmEx"};
constexpr const char* gemm_64_names[] = {"cublasGemmEx_64"};
constexpr const char* get_pointer_mode_names[] = {"cublasGetPointerMode_v2"};
constexpr const char* set_pointer_mode_names[] = {"cublasSetPointerMode_v2"};
constexpr std::array get_math_mode_names{"cublasGetMathMode"}, set_math_mode_names{"cublasSetMathMode"};
#endif

}  // namespace liger::gpu::blas

namespace liger::gpu {

// The running device's address of a variable in device memory.
template <class T> const T* device_address(const T& variable) {
  void* address = nullptr;
#if defined(__HIPCC__) || defined(__HIP__)
  const int code = hipGetSymbolAddress(&address, HIP_SYMBOL(variable));
#else
  const int code = cudaGetSymbolAddress(&address, variable);
#endif
  if (code != 0) throw_launch_error(code, "finding a device constant");
  return static_cast<const T*>(address);
}

}  // namespace liger::gpu
