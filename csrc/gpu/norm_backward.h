// The backward of RMSNorm, add+RMSNorm and LayerNorm. Bound by memory: dy and z are read once, dz is written once.
//
//   n = (z - mean) * rstd,  g = dy * (weight + offset)
//   dz = rstd * (g - mean(g) - n * mean(g * n)) [+ dsum],  dweight = sum of dy * n over rows,  dbias = sum of dy over rows
// For RMSNorm mean = mean(g) = 0.
//
// Registers path: persistent blocks walk over rows; a thread owns 8 or 16 columns, whose weights and fp32 sums stay in its registers,
// and the next row is on its way while this one is reduced. Rows that a block cannot hold are held by a cluster of blocks, where the
// device has clusters. Each block, or cluster, writes one partial row of its sums.
// Re-read path, for rows too long for that or of mixed dtypes: one kernel reduces mean(g) and mean(g * n) of each row, a second
// one owns tiles of columns and ranges of rows. Both paths end in column_sum.h.
#pragma once
#include "gpu/column_sum.h"
#include "gpu/rows.h"

namespace liger::gpu {

struct NormBackwardArgs {
  int64_t rows, cols;
  Rows dy, dsum, z;
  Vector weight;
  const float *mean, *rstd;
  MutableRows dz;
  MutableVector dweight, dbias;
  float offset;
  float inverse_cols = 0;
  float* partial = nullptr;     // [partial rows, cols], twice the columns for LayerNorm: dweight, dbias
  float* row_means = nullptr;   // [rows, 2]: mean(g), mean(g * n); re-read path
  int threads_per_row = 0;
  int64_t rows_per_block = 0;   // of the re-read path's second kernel
};

// weight + offset of VEC columns, or 1.
template <int VEC>
LIGER_DEVICE void load_weight(float (&weight)[VEC], const NormBackwardArgs& a, int64_t column) {
  if (a.weight.data) load_any(weight, a.weight.data, a.weight.dtype, column);
#pragma unroll
  for (int i = 0; i < VEC; ++i) weight[i] = a.weight.data ? weight[i] + a.offset : 1;
}

// Threads: of a row, 512 or 1024, one row a block; 0: as the plan says, within a block of 256 (single elements: 512).
template <class T, int VEC, int Threads, bool Centered>
struct NormBackwardRegisters {
  using Args = NormBackwardArgs;
  static constexpr int K = launch::norm_backward_k(VEC), max_threads = Threads > 0 ? Threads : VEC == 1 ? 512 : 256;
  // Two blocks of 256 threads on a multiprocessor. At 1024 threads there are 64 registers for each: enough for one row and its
  // sums, while weights are loaded where they are used.
  static constexpr int min_blocks = Threads == 0 && VEC > 1 ? 2 : 1;
  static constexpr bool prefetch = Threads < 1024;
  using Tile = Columns<VEC, K>;
  using Sums = float[K][VEC];

  struct Row {
    Packed<T, VEC> dy[K], z[K];
    float mean, rstd;
    LIGER_DEVICE void fetch(const Args& a, const RowGroup& group, int64_t row) {
      const bool live = row < a.rows;
      const Tile columns(group.index, group.threads_per_row, 0, live ? a.cols : 0);
      columns.template load<Hint::stream>(z, a.z.data, row * a.z.stride);
      columns.template load<Hint::stream>(dy, a.dy.data, row * a.dy.stride);
      rstd = live ? a.rstd[row] : 0;
      mean = Centered && live ? a.mean[row] : 0;
    }
    // Widened values must not wait in registers for a reduction to end: they are made again from the packed ones.
    LIGER_DEVICE void widen_again() {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        forget(dy[k].data);
        forget(z[k].data);
      }
    }
    LIGER_DEVICE float n(int k, int i) const { return (Centered ? z[k][i] - mean : z[k][i]) * rstd; }
  };

  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group = Threads > 0 ? RowGroup::whole_block<Threads>() : RowGroup(a.threads_per_row);
    const Tile columns(group.index, group.threads_per_row, 0, a.cols);
    Sums weight, dweight = {}, dbias = {};
    if constexpr (prefetch) for_each_vector(columns, [&](int k, int64_t column) { load_weight(weight[k], a, column); });
    const int64_t step = group.teams() * group.rows_per_block();
    int64_t row = group.first_row();
    Row next;
    next.fetch(a, group, row);
    // The same trip count for all threads: that of the block's first row.
    for (int64_t first = row - group.group; first < a.rows; first += step, row += step) {
      Row now = next;
      if constexpr (prefetch) next.fetch(a, group, row + step);
      const Tile live = Threads > 0 ? columns : Tile(group.index, group.threads_per_row, 0, row < a.rows ? a.cols : 0);
      Packed<T, VEC> dsum[K];
      if (prefetch && a.dsum.data) live.template load<Hint::stream>(dsum, a.dsum.data, row * a.dsum.stride);
      float means[Centered ? 2 : 1] = {};
      for_each_vector(columns, [&](int k, int64_t column) {
        if constexpr (!prefetch) load_weight(weight[k], a, column);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float dy = now.dy[k][i], n = now.n(k, i), g = dy * weight[k][i];
          means[0] += g * n;
          dweight[k][i] += dy * n;
          if constexpr (Centered) {
            means[1] += g;
            dbias[k][i] += dy;
          }
        }
      });
      if (a.dz.data) {
        group.sum(means);
        now.widen_again();
        // dz = rstd * g - from_g - (z - mean) * from_n
        const float from_n = now.rstd * now.rstd * (means[0] * a.inverse_cols);
        const float from_g = Centered ? now.rstd * (means[Centered] * a.inverse_cols) : 0;
        for_each_vector(live, [&](int k, int64_t column) {
          if constexpr (!prefetch) {
            load_weight(weight[k], a, column);
            if (a.dsum.data) load<Hint::stream>(dsum[k], static_cast<const T*>(a.dsum.data) + (row * a.dsum.stride + column));
          }
          float dz[VEC];
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            const float g = now.dy[k][i] * weight[k][i];
            dz[i] = now.rstd * g - (Centered ? (now.z[k][i] - now.mean) * from_n + from_g : now.z[k][i] * from_n);
            if (a.dsum.data) dz[i] += dsum[k][i];
          }
          Packed<T, VEC> out;
          out.set(dz);
          store<Hint::stream>(static_cast<T*>(a.dz.data) + (row * a.dz.stride + column), out);
        });
      }
      if constexpr (!prefetch) next.fetch(a, group, row + step);
    }
    if (a.partial == nullptr) return;
    const int64_t width = Centered ? 2 * a.cols : a.cols;
    float* const partial = a.partial + group.team() * width;
    write_partial(group, columns, dweight, a.cols, partial);
    if constexpr (Centered) write_partial(group, columns, dbias, a.cols, partial + a.cols);
  }

 private:
  template <class F>
  LIGER_DEVICE static void for_each_vector(const Tile& columns, F f) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k)) f(k, columns.first + k * columns.step);
  }
  // One partial row a block or cluster: where several rows share it, their groups' sums are added through shared memory, in order.
  LIGER_DEVICE static void write_partial(const RowGroup& group, const Tile& columns, const Sums& sums, int64_t cols, float* to) {
    const int groups = group.rows_per_block();
    if (groups == 1) {
      for_each_vector(columns, [&](int k, int64_t column) { store(to + column, reinterpret_cast<const Vec<float, VEC>&>(sums[k])); });
      return;
    }
    const Shared<float> all = shared<float>(RowGroup::shared_bytes<2>());
    block_barrier();
    for_each_vector(columns, [&](int k, int64_t column) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) all[group.group * int(cols) + int(column) + i] = sums[k][i];
    });
    block_barrier();
    for (int col = thread_id(); col < cols; col += block_threads()) {
      float sum = 0;
      for (int g = 0; g < groups; ++g) sum += all[g * int(cols) + col];
      to[col] = sum;
    }
  }
};

// Re-read path, first kernel: one block a row.
template <int VEC, bool Centered>
struct NormBackwardMeans {
  using Args = NormBackwardArgs;
  static constexpr int K = VEC == 8 ? 2 : 4, max_threads = launch::row_threads;
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
template <int VEC, bool Centered>
struct NormBackwardTiles {
  using Args = NormBackwardArgs;
  static constexpr int max_threads = launch::piece_threads;
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
        for (int i = 0; i < VEC; ++i)
          dz[0][i] += rstd * (dy[0][i] * weight[i] - mean_g - (z[0][i] - mean) * rstd * mean_gn);
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

// Elements of an access: 16 bytes of z's type; where dtypes are mixed, what serves all of them; 1 where rows are not aligned.
inline int norm_backward_vec(const NormBackwardArgs& a) {
  const bool wide = aligned(a.dy, a.cols) && aligned(a.dsum, a.cols) && aligned(a.z, a.cols) && aligned(a.dz, a.cols) &&
                    aligned(a.weight, a.cols);
  const bool any_f32 = a.z.dtype == Dtype::f32 || a.dy.dtype == Dtype::f32 || (a.dsum.data && a.dsum.dtype == Dtype::f32);
  const int vec = any_f32 ? 4 : 8;
  return wide && a.cols % vec == 0 ? vec : 1;
}
inline bool norm_backward_mixed(const NormBackwardArgs& a) {
  return a.dy.dtype != a.z.dtype || (a.dsum.data && a.dsum.dtype != a.z.dtype);
}

// Floats of partial sums, for whichever alignment the call will have.
inline int64_t norm_partial_floats(const launch::DeviceProfile& device, int64_t rows, int64_t cols, bool centered) {
  return launch::norm_partial_rows(device, rows, cols, centered) * cols * (centered ? 2 : 1);
}
inline int64_t norm_backward_workspace(int64_t rows, int64_t cols, bool centered, Stream stream) {
  const int64_t partial = norm_partial_floats(device_profile(stream.device), rows, cols, centered);
  return (partial + 2 * rows) * int64_t{sizeof(float)};
}

template <bool Centered>
void norm_backward(NormBackwardArgs a, void* workspace, Stream stream) {
  const launch::DeviceProfile& device = device_profile(stream.device);
  float* const partial = static_cast<float*>(workspace);
  if (a.dweight.data || a.dbias.data) a.partial = partial;
  a.inverse_cols = 1.0f / float(a.cols);
  a.row_means = partial + norm_partial_floats(device, a.rows, a.cols, Centered);
  const int vec = norm_backward_vec(a);
  const launch::NormBackwardPlans plans = launch::plan_norm_backward_paths(device, a.rows, a.cols, vec, Centered, norm_backward_mixed(a));
  const launch::LaunchPlan& plan = plans.sums;

  if (plan.path == launch::Path::regs) {
    a.threads_per_row = plan.threads_per_row;
    dispatch(a.z.dtype, [&](auto tag) {
      using T = std::remove_cvref_t<decltype(tag)>;
      constexpr int wide = 16 / int(sizeof(T));
      if (vec == 1) return launch<NormBackwardRegisters<T, 1, 0, Centered>>(plan, a, stream);
      if (plan.block <= 256) return launch<NormBackwardRegisters<T, wide, 0, Centered>>(plan, a, stream);
      if constexpr (!Centered)
        if (plan.block > 512) return launch<NormBackwardRegisters<T, wide, 1024, Centered>>(plan, a, stream);
      launch<NormBackwardRegisters<T, wide, 512, Centered>>(plan, a, stream);
    });
  } else {
    a.rows_per_block = launch::ceil_div(a.rows, plan.partial_rows);
    const auto start = [&](auto constant) {
      constexpr int VEC = decltype(constant)::value;
      if (a.dz.data) launch<NormBackwardMeans<VEC, Centered>>(plans.means, a, stream);
      launch<NormBackwardTiles<VEC, Centered>>(plan, a, stream);
    };
    if (vec == 8) start(std::integral_constant<int, 8>{});
    else if (vec == 4) start(std::integral_constant<int, 4>{});
    else start(std::integral_constant<int, 1>{});
  }
  const PartialSums sums{partial, plan.partial_rows, Centered ? 2 * a.cols : a.cols};
  sum_columns(sums, {0, a.cols, a.dweight}, stream);
  if constexpr (Centered) sum_columns(sums, {a.cols, a.cols, a.dbias}, stream);
}

}  // namespace liger::gpu
