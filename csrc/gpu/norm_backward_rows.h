// The backward of the norms without dweight and dbias: dz of each row by norm_backward.h's formula. Bound by memory.
//
// There are no sums over rows to keep, so, as in the forward, blocks are not persistent. The threads of a row hold it in registers, and
// issue all loads before they use the first value. The hardware starts blocks as others end, which keeps the memory busier than persistent
// blocks do.
#pragma once
#include "gpu/norm_backward.h"

namespace liger::gpu {

// Computes dz of the rows of this block. blocks_before: the number of blocks at the start of the grid that have no rows. Weight: the type
// of a vector of weights, which is Packed<T, VEC> for a weight of z's type, or float[VEC] for any weight or none.
template <class T, int VEC, int K, bool Centered, class Weight>
LIGER_DEVICE void norm_backward_row(const NormBackwardArgs& a, int64_t blocks_before = 0) {
  using Values = Packed<T, VEC>[K];
  constexpr bool packed_weight = !std::is_same_v<Weight, float[VEC]>;
  RowGroup group(a.threads_per_row);
  const int64_t row = group.first_row() - blocks_before * group.rows_per_block();
  const bool live = row < a.rows;
  const Columns<VEC, K> columns(group.index, group.threads_per_row, live ? int(a.cols) : 0);
  Values dy, z, dsum = {};
  columns.template load<Hint::stream>(z, a.z.data, row * a.z.stride);
  columns.template load<Hint::stream>(dy, a.dy.data, row * a.dy.stride);
  if (!Centered && a.dsum.data) columns.template load<Hint::stream>(dsum, a.dsum.data, row * a.dsum.stride);
  const float rstd = live ? a.rstd[row] : 0, mean = Centered && live ? a.mean[row] : 0;
  Weight weight[K] = {};
  if constexpr (packed_weight) columns.template load<Hint::constant>(weight, a.weight.data);
  else
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k)) load_weight(weight[k], a, columns.first + k * columns.step);
  const auto g = [&](int k, int i) { return dy[k][i] * (Centered || !packed_weight ? weight[k][i] : weight[k][i] + a.offset); };
  const auto centred = [&](int k, int i) { return Centered ? z[k][i] - mean : z[k][i]; };

  float means[Centered ? 2 : 1] = {};  // past the last column dy is 0
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      means[0] += g(k, i) * centred(k, i);
      if constexpr (Centered) means[1] += g(k, i);
    }
  group.sum(means);
  // dz = rstd * g - from_g - (z - mean) * from_n
  const float from_n = rstd * rstd * (means[0] * rstd * a.inverse_cols), from_g = Centered ? rstd * (means[Centered] * a.inverse_cols) : 0;
  T* const dz = opaque(static_cast<T*>(a.dz.data) + (row * a.dz.stride + columns.first));
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float out[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      out[i] = rstd * g(k, i) - centred(k, i) * from_n - from_g;
      if (!Centered && a.dsum.data) out[i] += dsum[k][i];
    }
    Packed<T, VEC> packed;
    packed.set(out);
    store<Hint::stream>(dz + k * columns.step, packed);
  }
}

// For calls in which no parameter requires a gradient (LoRA). The weight is of z's type, because a branch on its dtype before the load
// would slow the kernel down (docs/measurements.md). Calls with other weights or none, or with rows that 512 threads do not hold, take the
// other kernels of the backward.
template <class T, int VEC, int K, bool Centered> struct NormBackwardRows {
  using Args = NormBackwardArgs;
  static constexpr int max_threads = launch::norm_backward_rows.instance(VEC, K).max_threads,
                       min_blocks = 1;  // a thread may have as many registers as there are
  static LIGER_DEVICE void run(const Args& a) { norm_backward_row<T, VEC, K, Centered, Packed<T, VEC>>(a); }
};

}  // namespace liger::gpu
