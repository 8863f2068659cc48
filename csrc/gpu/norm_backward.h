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
#include "gpu/row_warps.h"
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
  int64_t row_step = 0;         // rows that all blocks together have at a time
  int64_t rows_per_block = 0;   // only for the re-read path's second kernel
  int64_t tile_blocks = 0;      // only for few rows: the first blocks, which take columns; the others take rows
};

// The factors of VEC columns: weight + offset, or 1 if there is no weight.
template <int VEC> LIGER_DEVICE void load_weight(float (&weight)[VEC], const NormBackwardArgs& a, int64_t column) {
  if (a.weight.data) load_any(weight, a.weight.data, a.weight.dtype, column);
#pragma unroll
  for (int i = 0; i < VEC; ++i) weight[i] = a.weight.data ? weight[i] + a.offset : 1;
}

// K: vectors per thread. Threads: threads of a row in a block, or launch::whole_warps; 0: the plan says it. Residual: dsum is there.
template <class T, int VEC, int K, int Threads, bool Centered, bool Residual> struct NormBackwardRegisters {
  using Args = NormBackwardArgs;
  static constexpr bool in_warps = Threads == launch::whole_warps;
  static constexpr int max_threads = launch::norm_backward_registers.instance(VEC, K, Threads).max_threads;
  static constexpr int min_blocks = 1;  // a thread may have as many registers as there are
  // With 1024 threads each has 64 registers: enough for one row and its sums, while weights are loaded where they are used.
  static constexpr bool holds_weight = max_threads < 1024;
  enum { dy, z, dsum, inputs = Residual ? 3 : 2 };
  using Group = std::conditional_t<in_warps, RowWarps<false>, RowGroupOf<in_warps ? 0 : Threads, true, Threads == 0>>;
  // The last argument: asynchronous copies by each thread (Ampere, Ada). LayerNorm has more to compute per element, and is slower with
  // them.
  using Stream = RowStream<Group, T, VEC, K, inputs, holds_weight ? 2 : 0, !Centered>;
  using Tile = Columns<VEC, K>;
  using Floats = float[K][VEC];

  // Devices with bulk copies have no use for blocks of 1,024 threads, and others none for three vectors per thread.
  static constexpr bool is_used = has_bulk_copies ? max_threads < 1024 : K != 3;

  static LIGER_DEVICE void run(const Args& a) {
    if constexpr (is_used) walk(a);
  }

 private:
  static LIGER_DEVICE void walk(const Args& a) {
    Group group(a.threads_per_row);
    const Tile columns = warp_columns<VEC, K>(group, a.cols);
    const int64_t step = a.row_step;
    int64_t row = group.first_row();
    Stream stream(group, steps(a, row), a.stages, a.ring_offset);
    // Past the last column dy, z and the weight are 0, and so is what is added to a sum.
    Floats weight = {}, dweight = {}, dbias = {};
    if constexpr (holds_weight) load_weights(weight, a, columns);
    T* dz = opaque(static_cast<T*>(a.dz.data) + (row * a.dz.stride + columns.first));
    float next_rstd, next_mean;
    const auto fetch_statistics = [&](int64_t of) {
      next_rstd = of < a.rows ? a.rstd[of] : 0;
      next_mean = Centered && of < a.rows ? a.mean[of] : 0;
    };
    fetch_statistics(row);
    // Threads that meet at a barrier make the same number of iterations: those of a row, or all of a block, whose first row then decides.
    constexpr bool alone = Threads >= 512 || (in_warps && has_group_barriers);
    for (const int64_t end = alone ? a.rows : a.rows + group.group; row < end; row += step, dz += step * a.dz.stride) {
      Packed<T, VEC> in[inputs][K];
      stream.take(in);
      if (a.stages == 1) stream.release();  // else nothing would be in flight until the reduction has ended
      const bool live = alone || row < a.rows;
      if (!live) clear(in);
      const float rstd = next_rstd, mean = next_mean;
      fetch_statistics(row + step);
      Floats g;
      float parts[Centered ? 2 : 1][2] =
          {};  // of the sums of g * n and of g: of even and of odd elements, since additions depend on each other
      if constexpr (!holds_weight) load_weights(weight, a, columns);
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float n = normalized(in[z][k][i], mean, rstd);
          g[k][i] = in[dy][k][i] * weight[k][i];
          dweight[k][i] += in[dy][k][i] * n;
          parts[0][i % 2] += g[k][i] * n;
          if constexpr (Centered) {
            dbias[k][i] += in[dy][k][i];
            parts[1][i % 2] += g[k][i];
          }
        }
      float means[Centered ? 2 : 1] = {parts[0][0] + parts[0][1]};
      if constexpr (Centered) means[1] = parts[1][0] + parts[1][1];
      if (a.dz.data) group.sum(means);
      if (a.stages > 1) stream.release();  // here the fence waits for nothing: before the sum it costs calls of 8,192 rows up to 5 %
      if (a.dz.data == nullptr) continue;
      // dz = rstd * (g - mean(g) - (z - mean) * rstd * mean(g * n))
      const float from_n = rstd * rstd * (means[0] * a.inverse_cols), from_g = Centered ? rstd * (means[Centered] * a.inverse_cols) : 0;
      const float constant = mean * from_n - from_g;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        forget(in[z][k].data);  // else the compiler keeps its widened values in registers during the reduction
        if (!holds_weight) forget(in[dy][k].data);
        float out[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float of_g = holds_weight ? g[k][i] : in[dy][k][i] * weight[k][i];
          out[i] = rstd * of_g + (one_step ? constant - in[z][k][i] * from_n : -(in[z][k][i] - mean) * from_n - from_g);
          if constexpr (Residual) out[i] += in[dsum][k][i];
        }
        Packed<T, VEC> packed;
        packed.set(out);
        if (live && columns.has(k)) store<Hint::stream>(dz + k * columns.step, packed);
      }
    }
    let_next_kernel_start();
    if (a.partial) store_sums(a, group, columns, dweight, dbias);
  }

  // (z - mean) * rstd, for 16-bit types as one multiply-add: it rounds mean * rstd, but mean is rounded, too.
  static constexpr bool one_step = !Centered || sizeof(T) == 2;
  LIGER_DEVICE static float normalized(float z, float mean, float rstd) {
    return !Centered ? z * rstd : one_step ? z * rstd - mean * rstd : (z - mean) * rstd;
  }
  LIGER_DEVICE static RowSteps<inputs> steps(const Args& a, int64_t row) {
    if constexpr (Residual) return {row, a.row_step, a.rows, a.cols, {a.dy, a.z, a.dsum}};
    else return {row, a.row_step, a.rows, a.cols, {a.dy, a.z}};
  }
  LIGER_DEVICE static void load_weights(Floats& weight, const Args& a, const Tile& columns) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k)) load_weight(weight[k], a, columns.first + k * columns.step);
  }
  LIGER_DEVICE static void clear(Packed<T, VEC> (&in)[inputs][K]) {
#pragma unroll
    for (int n = 0; n < inputs; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) in[n][k] = {};
  }
  // Writes the block's partial row. If it has several rows at a time, their sums are added up in shared memory, in a fixed order; the rings
  // that were there are no longer needed.
  LIGER_DEVICE static void store_sums(const Args& a, const Group& group, const Tile& columns, const Floats& dweight, const Floats& dbias) {
    const int width = int(Centered ? 2 * a.cols : a.cols), groups = group.rows_per_block();
    float* const partial = a.partial + group.team() * width;
    const Shared<float> sums = shared<float>(Group::template shared_bytes<2>());
    // Called with a pointer to either kind of memory: one that may point to both makes slower accesses on AMD.
    const auto store_own = [&](float* to) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!columns.has(k)) continue;
        float* const at = to + columns.first + k * columns.step;
        store(at, reinterpret_cast<const Vec<float, VEC>&>(dweight[k]));
        if constexpr (Centered) store(at + a.cols, reinterpret_cast<const Vec<float, VEC>&>(dbias[k]));
      }
    };
    if (groups == 1) return store_own(opaque(partial));
    block_barrier();
    store_own(&sums[group.group * width]);
    block_barrier();
    constexpr int N = VEC > 1 ? 4 : 1;
    for (int col = thread_id() * N; col < width; col += block_threads() * N) {
      Vec<float, N> total = {};
#pragma unroll 4
      for (int of = 0; of < groups; ++of) {
        Vec<float, N> one;
        load(one, &sums[of * width + col]);
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] += one[i];
      }
      store(partial + col, total);
    }
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
