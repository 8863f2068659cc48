// LIGER_FN: the qualifiers of the functions in math/, which CPU code and GPU kernels share.
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
#define LIGER_FN __host__ __device__ __forceinline__
#else
#define LIGER_FN __attribute__((always_inline)) inline
#endif
