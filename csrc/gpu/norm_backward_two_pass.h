// The backward of the norms for rows that no block or cluster holds, and for calls whose dy, dsum and z do not all have one dtype. dy and z
// are read twice: one kernel computes mean(g) and mean(g * n) of each row; a second one computes dz and the partial sums of dweight and
// dbias, for tiles of columns and ranges of rows.
#pragma once
#include "gpu/norm_backward.h"

namespace liger::gpu {

// The first kernel: one block per row.
template <int VEC, bool Centered> struct NormBackwardMeans {
  using Args = NormBackwardArgs;
  static constexpr int K = VEC == 8 ? 2 : 4, max_threads = launch::norm_backward_means.instance(VEC).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const int64_t row = block_id();
    const float mean = Centered ? a.mean[row] : 0, rstd = a.rstd[row];
    float means[2] = {};
    for (int64_t begin = 0; begin < a.cols; begin += int64_t{block_threads()} * K * VEC) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, a.cols);
      float dy[K][VEC], z[K][VEC];
      columns.load(dy, a.dy.data, a.dy.dtype, row * a.dy.stride);
      columns.load(z, a.z.data, a.z.dtype, row * a.z.stride);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!columns.has(k)) continue;
        float weight[VEC];
        load_weight(weight, a, columns.first + k * columns.step);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float g = dy[k][i] * weight[i];
          means[0] += g;
          means[1] += g * (z[k][i] - mean) * rstd;
        }
      }
    }
    group.sum(means);
    if (group.index == 0) {
      a.row_means[2 * row] = means[0] / float(a.cols);
      a.row_means[2 * row + 1] = means[1] / float(a.cols);
    }
  }
};

// The second kernel: a block owns block_threads() * VEC columns of rows_per_block rows.
template <int VEC, bool Centered> struct NormBackwardTiles {
  using Args = NormBackwardArgs;
  static constexpr int max_threads = launch::norm_backward_tiles.instance(VEC).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    const int64_t tile_cols = int64_t{block_threads()} * VEC, tiles = (a.cols + tile_cols - 1) / tile_cols;
    const int64_t range = block_id() / tiles, tile = block_id() % tiles;
    const Columns<VEC, 1> columns(thread_id(), block_threads(), tile * tile_cols, a.cols);
    const int64_t end = a.rows < (range + 1) * a.rows_per_block ? a.rows : (range + 1) * a.rows_per_block;
    float weight[VEC], dweight[VEC] = {}, dbias[VEC] = {};
    if (columns.has(0)) load_weight(weight, a, columns.first);
    for (int64_t row = range * a.rows_per_block; row < end; ++row) {
      const float mean = Centered ? a.mean[row] : 0, rstd = a.rstd[row];
      float dy[1][VEC], z[1][VEC];
      columns.template load<Hint::stream>(dy, a.dy.data, a.dy.dtype, row * a.dy.stride);
      columns.template load<Hint::stream>(z, a.z.data, a.z.dtype, row * a.z.stride);
      if (a.dz.data) {
        const float mean_g = Centered ? a.row_means[2 * row] : 0, mean_gn = a.row_means[2 * row + 1];
        float dz[1][VEC] = {};
        if (a.dsum.data) columns.template load<Hint::stream>(dz, a.dsum.data, a.dsum.dtype, row * a.dsum.stride);
#pragma unroll
        for (int i = 0; i < VEC; ++i) dz[0][i] += rstd * (dy[0][i] * weight[i] - mean_g - (z[0][i] - mean) * rstd * mean_gn);
        columns.template store<Hint::stream>(dz, a.dz.data, a.dz.dtype, row * a.dz.stride);
      }
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        dweight[i] += dy[0][i] * (z[0][i] - mean) * rstd;
        if constexpr (Centered) dbias[i] += dy[0][i];
      }
    }
    if (a.partial == nullptr || !columns.has(0)) return;
    float* const to = a.partial + range * (Centered ? 2 * a.cols : a.cols) + columns.first;
    store(to, reinterpret_cast<const Vec<float, VEC>&>(dweight));
    if constexpr (Centered) store(to + a.cols, reinterpret_cast<const Vec<float, VEC>&>(dbias));
  }
};

}  // namespace liger::gpu
