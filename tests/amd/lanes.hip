// Small kernels in which the lanes of a wave read each other's registers. tests/amd/lanes.py runs them in the emulator and compares them
// with the expected results.
#include "gpu/platform.h"

using namespace liger::gpu;

// A few instructions whose destination is one of their sources. Hardware reads every lane before it writes one.
#define IN_PLACE(NAME, CODE)                                                           \
  extern "C" __global__ void __launch_bounds__(64) NAME(const float* in, float* out) { \
    float v = in[thread_id()];                                                         \
    const float half = 0.5f;                                                           \
    asm volatile("s_nop 4\n" CODE "\ns_nop 4" : "+v"(v) : "v"(half) : "s20");          \
    out[thread_id()] = v;                                                              \
  }
#define ALL_ROWS " row_mask:0xf bank_mask:0xf\n"
#define OVER_16_LANES(OPERATION)                                                                                        \
  OPERATION " quad_perm:[1,0,3,2]" ALL_ROWS "s_nop 4\n" OPERATION " quad_perm:[2,3,0,1]" ALL_ROWS "s_nop 4\n" OPERATION \
            " row_half_mirror" ALL_ROWS "s_nop 4\n" OPERATION " row_mirror" ALL_ROWS

IN_PLACE(quad, "v_mov_b32_dpp %0, %0 quad_perm:[1,0,3,2]" ALL_ROWS)
IN_PLACE(rotate, "v_mov_b32_dpp %0, %0 row_ror:3" ALL_ROWS)
IN_PLACE(swizzle, "ds_swizzle_b32 %0, %0 offset:swizzle(BITMASK_PERM, \"10p0i\")\ns_waitcnt lgkmcnt(0)")
IN_PLACE(sum, OVER_16_LANES("v_add_f32_dpp %0, %0, %0"))
IN_PLACE(maximum, OVER_16_LANES("v_max_f32_dpp %0, %0, %0"))
IN_PLACE(weighted, OVER_16_LANES("v_fmac_f32_dpp %0, %0, %1"))
#if !defined(__GFX9__)
IN_PLACE(neighbours, "v_mov_b32_dpp %0, %0 row_xmask:5" ALL_ROWS)
IN_PLACE(rows, "s_mov_b32 s20, 0x76543210\nv_permlanex16_b32 %0, %0, s20, 0xfedcba98")
#endif

// Every second lane is switched off, and its neighbour reads it: as 0.
extern "C" __global__ void __launch_bounds__(64) switched_off(const float* in, float* out) {
  float v = in[thread_id()];
  if (thread_id() & 1) v += bit_cast<float>(__builtin_amdgcn_update_dpp(0, bit_cast<int>(v), 0xb1, 0xf, 0xf, true));
  out[thread_id()] = v;
}

// The reductions of kernels over a wave: a sum, a maximum, and a weighted sum, in which every order of the lanes gives another result.
extern "C" __global__ void __launch_bounds__(64) reductions(const float* in, float* out) {
  float sum = in[thread_id()], maximum = sum, weighted = sum;
#pragma unroll
  for (int mask = warp_width() / 2; mask > 0; mask /= 2) {
    sum += shfl_xor(sum, mask);
    maximum = fmaxf(maximum, shfl_xor(maximum, mask));
    weighted = weighted / 2 + shfl_xor(weighted, mask);
  }
  out[thread_id()] = sum;
  out[64 + thread_id()] = maximum;
  out[128 + thread_id()] = weighted;
}

// The platform's shfl_xor with every mask, as a compile-time constant and as a run-time value.
extern "C" __global__ void __launch_bounds__(64) exchanges(const float* in, float* out, int runtime) {
  const float v = in[thread_id()];
  int place = 0;
  const auto put = [&](float result) { out[64 * place++ + thread_id()] = result; };
#pragma unroll
  for (int mask = 1; mask < warp_width(); mask *= 2) {
    put(shfl_xor(v, mask));
    put(bit_cast<float>(shfl_xor(bit_cast<int>(v), mask)));
    put(float(shfl_xor(double(v), mask)));
    put(shfl_xor(v, mask * runtime));
  }
}
