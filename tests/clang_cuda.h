// The names of nvcc that clang's CUDA headers lack, for tests/compile_cuda12.sh alone.
#pragma once
#define __CUDA_ARCH_LIST__ 700, 750, 800, 860, 890, 900

__device__ inline void __stcs(unsigned* to, unsigned v) { asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory"); }
__device__ inline void __stcs(uint2* to, uint2 v) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void __stcs(uint4* to, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
