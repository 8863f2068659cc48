// The C interface of cuBLAS or hipBLAS that gemm.cu uses: prototypes, enumerators, and the names of functions. The build needs neither
// the library nor its headers: gemm.cu looks up the functions in the library that torch has loaded.
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

// cublasLt, which adds a bias to a 16-bit product before it rounds. It accepts a handle of cuBLAS; matrices are column-major. Structs and
// enumerators are the same in CUDA 11, 12 and 13.
using Descriptor = void*;
struct LtAlgorithm {
  uint64_t data[8];
};
struct LtResult {
  LtAlgorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};
using LtCreateMatmul = int (*)(Descriptor*, int compute, int scale_type);
using LtCreateLayout = int (*)(Descriptor*, int type, uint64_t rows, uint64_t cols, int64_t ld);
using LtCreatePreference = int (*)(Descriptor*);
using LtSetAttribute = int (*)(Descriptor, int attribute, const void* value, size_t bytes);
using LtDestroy = int (*)(Descriptor);
using LtFindAlgorithm = int (*)(Handle, Descriptor matmul, Descriptor a, Descriptor b, Descriptor c, Descriptor d, Descriptor preference,
                                int wanted, LtResult* results, int* found);
using LtMatmul = int (*)(Handle, Descriptor matmul, const void* alpha, const void* a, Descriptor, const void* b, Descriptor,
                         const void* beta, const void* c, Descriptor, void* d, Descriptor, const LtAlgorithm*, void* workspace,
                         size_t workspace_bytes, void* stream);
// Attributes of matmuls and of preferences.
enum LtAttribute { lt_transa = 3, lt_transb = 4, lt_epilogue = 7, lt_bias = 8 };
enum LtPreference { lt_alignment_a = 5, lt_alignment_b = 6, lt_alignment_c = 7, lt_alignment_d = 8 };
constexpr uint32_t lt_add_bias = 4;

enum PointerMode { host = 0, device = 1 };
// A flag of a math mode: partial sums of 16-bit products are not added up in 16 bits.
constexpr int no_reduced_precision = 16;
constexpr int real_f32 = 0, real_f16 = 2, real_bf16 = 14;

// Names of functions are tried in this order.
#if defined(__HIPCC__) || defined(__HIP__)
constexpr const char* library = "hipBLAS";
constexpr int normal = 111, transpose = 112, compute_f32 = 2, default_algorithm = 160;
// hipBLAS 2 has this interface under _v2, hipBLAS 3 under the plain name.
constexpr const char* gemm_names[] = {"hipblasGemmEx_v2", "hipblasGemmEx"};
constexpr const char* gemm_64_names[] = {"hipblasGemmEx_v2_64", "hipblasGemmEx_64"};
constexpr const char* get_pointer_mode_names[] = {"hipblasGetPointerMode"};
constexpr const char* set_pointer_mode_names[] = {"hipblasSetPointerMode"};
// Not needed: hipBLAS computes sums in fp32, whatever the mode.
constexpr std::array<const char*, 0> get_math_mode_names, set_math_mode_names;
// No cublasLt, and no need for it: hipBLAS adds C in fp32.
constexpr std::array<const char*, 0> lt_create_matmul_names, lt_create_layout_names, lt_create_preference_names, lt_destroy_matmul_names,
    lt_destroy_layout_names, lt_destroy_preference_names, lt_set_matmul_names, lt_set_preference_names, lt_find_algorithm_names,
    lt_matmul_names;
#else
constexpr const char* library = "cuBLAS";
constexpr int normal = 0, transpose = 1, compute_f32 = 68, default_algorithm = -1;
constexpr const char* gemm_names[] = {"cublasGemmEx"};
constexpr const char* gemm_64_names[] = {"cublasGemmEx_64"};
constexpr const char* get_pointer_mode_names[] = {"cublasGetPointerMode_v2"};
constexpr const char* set_pointer_mode_names[] = {"cublasSetPointerMode_v2"};
constexpr std::array get_math_mode_names{"cublasGetMathMode"}, set_math_mode_names{"cublasSetMathMode"};
constexpr std::array lt_create_matmul_names{"cublasLtMatmulDescCreate"}, lt_create_layout_names{"cublasLtMatrixLayoutCreate"},
    lt_create_preference_names{"cublasLtMatmulPreferenceCreate"}, lt_destroy_matmul_names{"cublasLtMatmulDescDestroy"},
    lt_destroy_layout_names{"cublasLtMatrixLayoutDestroy"}, lt_destroy_preference_names{"cublasLtMatmulPreferenceDestroy"},
    lt_set_matmul_names{"cublasLtMatmulDescSetAttribute"}, lt_set_preference_names{"cublasLtMatmulPreferenceSetAttribute"},
    lt_find_algorithm_names{"cublasLtMatmulAlgoGetHeuristic"}, lt_matmul_names{"cublasLtMatmul"};
#endif

}  // namespace liger::gpu::blas

namespace liger::gpu {

// Returns the address, on the current device, of a variable in device memory.
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
