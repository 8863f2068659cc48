// The backward of RMSNorm, add+RMSNorm and LayerNorm. Bound by memory: dy and z are read once, dz is written once.
//
//   n = (z - mean) * rstd,  g = dy * (weight + offset)
//   dz = rstd * (g - mean(g) - n * mean(g * n)) [+ dsum],  dweight = sum of dy * n over rows,  dbias = sum of dy over rows
// For RMSNorm mean = mean(g) = 0.
//
// Registers path: persistent blocks walk over rows; a thread owns 8 to 24 columns, whose weights and fp32 sums stay in its registers,
// and a RowStream brings the next rows while this one is reduced. Rows that a block cannot hold are held by a cluster of blocks, where
// the device has clusters. Each block, or cluster, writes one partial row of its sums: where one block fills a multiprocessor
// with rows in flight, there is only one such row for each.
// Re-read path, for rows too long for that or of mixed dtypes: one kernel reduces mean(g) and mean(g * n) of each row, a second
// one owns tiles of columns and ranges of rows. Both paths end in column_sum.h. Where no sums are wanted: norm_backward_rows.h.
#pragma once
#include "gpu/device.h"
#include "gpu/row_stream.h"
#include "kernels/norms.h"
#include "launch/norms.h"

namespace liger::gpu {

// NormBackward as the kernels of both norms take it.
struct NormBackwardArgs {
  int64_t rows, cols;
  Rows dy, dsum, z;
  Vector weight;
  const float *mean, *rstd;
  MutableRows dz;
  MutableVector dweight, dbias;
  float offset;
  float inverse_cols = 0;
  float* partial = nullptr;     // [partial rows, cols]: sums for dweight; LayerNorm: [partial rows, 2 * cols], dbias behind them
  float* row_means = nullptr;   // [rows, 2]: mean(g), mean(g * n); only for the re-read path
  int threads_per_row = 0, stages = 0, ring_offset = 0;
  int64_t rows_per_block = 0;   // only for the re-read path's second kernel
};

// The factors of VEC columns: weight + offset, or 1 if there is no weight.
template <int VEC> LIGER_DEVICE void load_weight(float (&weight)[VEC], const NormBackwardArgs& a, int64_t column) {
  if (a.weight.data) load_any(weight, a.weight.data, a.weight.dtype, column);
#pragma unroll
  for (int i = 0; i < VEC; ++i) weight[i] = a.weight.data ? weight[i] + a.offset : 1;
}

// K: vectors per thread. Threads: threads per row, if the compiler is to know them; 0: the plan says it at run time.
template <class T, int VEC, int K, int Threads, bool Centered> struct NormBackwardRegisters {
  using Args = NormBackwardArgs;
  static constexpr int max_threads = launch::norm_backward_registers.instance(VEC, K, Threads).max_threads;
  static constexpr int min_blocks = 1;  // a thread may have as many registers as there are
  // spacious: there are registers for the weights. With 1024 threads each has 64: enough for one row and its sums, while weights are loaded
  // where they are used.
  static constexpr bool spacious = Threads < 1024;
  using Tile = Columns<VEC, K>;
  using Sums = float[K][VEC];
  enum { dy, z, dsum, inputs = Centered ? 2 : 3 };  // LayerNorm has no dsum
  using Group = RowGroupOf<Threads, true, (Threads < 512)>;
  // The last argument: asynchronous copies by each thread (Ampere, Ada). LayerNorm has more to compute per element, and is slower with
  // them.
  using Stream = RowStream<Group, T, VEC, K, inputs, 2, spacious ? 2 : 0, !Centered>;
  // n = (z - mean) * rstd as one multiply-add, z * rstd - mean * rstd, for 16-bit types. It rounds mean * rstd, but mean is rounded, too.
  static constexpr bool one_step = Centered && sizeof(T) == 2;

  static LIGER_DEVICE void run(const Args& a) {
    Group group(a.threads_per_row);
    const Tile columns = warp_columns<VEC, K>(group, a.cols);
    const int64_t step = group.teams() * group.rows_per_block();
    int64_t row = group.first_row();
    const Rows tensors[3] = {a.dy, a.z, a.dsum};
    Stream stream(group, {row, step, a.rows, a.cols, tensors}, a.stages, a.ring_offset);
    Sums weight, dweight = {}, dbias = {};
    if constexpr (spacious) for_each_vector(columns, [&](int k, int64_t column) { load_weight(weight[k], a, column); });
    float next_rstd, next_mean;
    const auto fetch_statistics = [&](int64_t of) {
      next_rstd = of < a.rows ? a.rstd[of] : 0;
      next_mean = Centered && of < a.rows ? a.mean[of] : 0;
    };
    fetch_statistics(row);
    // All threads must make the same number of iterations, as they meet in group.sum: the block's first row decides it for all.
    for (int64_t first = row - group.group; first < a.rows; first += step, row += step) {
      Packed<T, VEC> in[inputs][K];
      stream.take(in);
      const bool live = Threads >= 512 || row < a.rows;
      if (!live) clear(in);
      const float rstd = next_rstd, mean = next_mean, shift = -mean * rstd;
      fetch_statistics(row + step);
      float means[Centered ? 2 : 1] = {};
      for_each_vector(columns, [&](int k, int64_t column) {
        if constexpr (!spacious) load_weight(weight[k], a, column);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float n = one_step ? in[z][k][i] * rstd + shift : (Centered ? in[z][k][i] - mean : in[z][k][i]) * rstd;
          const float dyn = in[dy][k][i] * n;
          dweight[k][i] += dyn;
          means[0] += dyn * weight[k][i];
          if constexpr (Centered) {
            means[1] += in[dy][k][i] * weight[k][i];
            dbias[k][i] += in[dy][k][i];
          }
        }
      });
      if (a.dz.data == nullptr) continue;
      group.sum(means);
      // The compiler would keep the widened values in registers during the reduction. This makes it widen the packed ones again.
#pragma unroll
      for (int k = 0; k < K; ++k) {
        forget(in[dy][k].data);
        forget(in[z][k].data);
      }
      // dz = rstd * g - from_g - (z - mean) * from_n
      const float from_n = rstd * rstd * (means[0] * a.inverse_cols), from_g = Centered ? rstd * (means[Centered] * a.inverse_cols) : 0;
      const float constant = mean * from_n - from_g;
      T* const dz = opaque(static_cast<T*>(a.dz.data) + (row * a.dz.stride + columns.first));
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!live || !columns.has(k)) continue;
        if constexpr (!spacious) load_weight(weight[k], a, columns.first + k * columns.step);
        float out[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float g = in[dy][k][i] * weight[k][i],
                      other = one_step ? constant - in[z][k][i] * from_n : -(in[z][k][i] - mean) * from_n - from_g;
          out[i] = rstd * g + other;
          if (!Centered && a.dsum.data) out[i] += in[dsum][k][i];
        }
        Packed<T, VEC> packed;
        packed.set(out);
        store<Hint::stream>(dz + k * columns.step, packed);
      }
    }
    let_next_kernel_start();
    if (a.partial == nullptr) return;
    const int64_t width = Centered ? 2 * a.cols : a.cols;
    float* const partial = a.partial + group.team() * width;
    const int groups = group.rows_per_block();
    if (groups == 1) {
      for_each_vector(columns, [&](int k, int64_t column) {
        store(partial + column, reinterpret_cast<const Vec<float, VEC>&>(dweight[k]));
        if constexpr (Centered) store(partial + a.cols + column, reinterpret_cast<const Vec<float, VEC>&>(dbias[k]));
      });
      return;
    }
    // A block that has several rows at a time has as many sums for each column: they are added up in shared memory, in a fixed order. The
    // rings that were there are no longer needed.
    const Shared<float> all = shared<float>(RowGroup::shared_bytes<2>());
    block_barrier();
    for_each_vector(columns, [&](int k, int64_t column) {
      const int at = group.group * int(width) + int(column);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        all[at + i] = dweight[k][i];
        if constexpr (Centered) all[at + int(a.cols) + i] = dbias[k][i];
      }
    });
    block_barrier();
    for (int col = thread_id(); col < width; col += block_threads()) {
      float sum = 0;
#pragma unroll 8
      for (int g = 0; g < groups; ++g) sum += all[g * int(width) + col];
      partial[col] = sum;
    }
  }

 private:
  LIGER_DEVICE static void clear(Packed<T, VEC> (&in)[inputs][K]) {
#pragma unroll
    for (int n = 0; n < inputs; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) in[n][k] = {};
  }
  template <class F> LIGER_DEVICE static void for_each_vector(const Tile& columns, F f) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k)) f(k, columns.first + k * columns.step);
  }
};

// Re-read path, first kernel: one block per row.
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

// Re-read path, second kernel: a block owns block_threads() * VEC columns of rows_per_block rows.
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
