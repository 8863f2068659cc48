// LIGER_FN marks functions of formulas that the CPU backend and GPU kernels share.
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
#define LIGER_FN __host__ __device__ __forceinline__
#else
#define LIGER_FN __attribute__((always_inline)) inline
#endif
