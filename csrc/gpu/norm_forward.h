// The forward of RMSNorm, add+RMSNorm and LayerNorm. Bound by memory: each row is read once and written once.
//
//   y = n * (weight + offset) + bias,   n = (z - mean) * rstd,   z = x [+ residual, stored as `sum`];   RMSNorm: mean = 0
//
// Registers path: the threads of a row hold it, 32 columns each, 64 in rows too long for two blocks on a multiprocessor otherwise, all
// loads in flight before the first use; the variance is that of the centred registers, so that it does not cancel. Stream path: rows
// that a block cannot hold are held by a cluster of persistent blocks, where the device has them, to which a RowStream brings the next
// ones, since the clusters' exchanges and starts would leave the memory idle. Re-read path, for longer rows: one pass for
// the statistics (LayerNorm merges batches by Chan's formula), a second for the result, both by the same thread, so that the
// second mostly hits the L2. On an H200 instructions are the second limit: there are kernels of their own for the usual parameters.
#pragma once
#include "gpu/device.h"
#include "gpu/row_stream.h"

namespace liger::gpu {

struct NormForwardArgs {
  int64_t rows, cols;
  Rows x, residual;
  MutableRows sum, y;
  Vector weight, bias;
  float *mean, *rstd;
  float eps, offset;
  bool round_normalized;
  float inverse_cols = 0;
  int threads_per_row = 0, stages = 0, ring_offset = 0;
};

// What all paths do with their K vectors of a row. T is the type of what is normalised, and of y; x and the residual may be of
// other types where T is fp32. The row stays in T, which is exact and half the registers; it is widened where it is used.
// Usual: weight, and bias, are there and of type T; else both may be missing, or of any type.
template <class T, int VEC, int K, bool Centered, bool Usual> struct NormTile {
  using Values = Packed<T, VEC>[K];
  const NormForwardArgs& a;
  const Columns<VEC, K> columns;
  const int64_t row;

  // z, rounded as its stored copy is.
  LIGER_DEVICE void load_input(Values& z) const {
    load_as_t(z, a.x);
    if (Centered || a.residual.data == nullptr) return;
    Values residual;
    load_as_t(residual, a.residual);
    add_residual(z, residual);
  }
  LIGER_DEVICE void add_residual(Values& z, const Values& residual) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float sum[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum[i] = z[k][i] + residual[k][i];
      z[k].set(sum);
    }
    columns.store(z, a.sum.data, row * a.sum.stride);
  }
  LIGER_DEVICE void load_as_t(Values& out, const Rows& from) const {
    if constexpr (std::is_same_v<T, float>)
      if (from.dtype != Dtype::f32) {
        float wide[K][VEC];
        columns.template load<Hint::stream>(wide, from.data, from.dtype, row * from.stride);
#pragma unroll
        for (int k = 0; k < K; ++k) out[k].set(wide[k]);
        return;
      }
    columns.template load<Hint::stream>(out, from.data, row * from.stride);
  }
  // The usual weights come with the row, so that their latency is the row's; unless their registers are needed for the row.
  static constexpr bool early_weight = Usual && K <= 4;
  LIGER_DEVICE void load_weight(Values& weight) const {
    if constexpr (early_weight) columns.template load<Hint::constant>(weight, a.weight.data);
  }
  LIGER_DEVICE void load_bias(Values& bias) const {
    if constexpr (early_weight && Centered) columns.template load<Hint::constant>(bias, a.bias.data);
  }
  LIGER_DEVICE float sum(const Values& z) const {
    float total = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < VEC; ++i) total += z[k][i];
    return total;
  }
  LIGER_DEVICE float squares(const Values& z, float mean) const {
    float total = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (!Centered || columns.has(k))
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float centred = Centered ? z[k][i] - mean : z[k][i];
          total += centred * centred;
        }
    return total;
  }
  // y from z. weight and bias have been loaded, if they are early.
  LIGER_DEVICE void finish(const Values& z, const Values& weight, const Values& bias, float mean, float rstd) const {
    if constexpr (Usual) {
      write(z, mean, rstd, [&](float (&y)[VEC], int k, int64_t at) {
        Packed<T, VEC> w, b = {};
        if constexpr (early_weight) w = weight[k];
        else gpu::load<Hint::constant>(w, static_cast<const T*>(a.weight.data) + at);
        if constexpr (Centered && early_weight) b = bias[k];
        else if constexpr (Centered) gpu::load<Hint::constant>(b, static_cast<const T*>(a.bias.data) + at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) y[i] = Centered ? y[i] * w[i] + b[i] : y[i] * (w[i] + a.offset);
      });
    } else {
      with_dtype(a.weight.data ? a.weight.dtype : a.bias.dtype, [&](auto tag) {  // one decision a row, not one an access
        using W = std::remove_cvref_t<decltype(tag)>;
        write(z, mean, rstd, [&](float (&y)[VEC], int, int64_t at) {
          Packed<W, VEC> p;
          if (a.weight.data) {
            gpu::load<Hint::constant>(p, static_cast<const W*>(a.weight.data) + at);
#pragma unroll
            for (int i = 0; i < VEC; ++i) y[i] *= Centered ? p[i] : p[i] + a.offset;
          }
          if (!Centered || a.bias.data == nullptr) return;
          if (a.bias.dtype != dtype_of<W>) return add(y, at);
          gpu::load<Hint::constant>(p, static_cast<const W*>(a.bias.data) + at);
#pragma unroll
          for (int i = 0; i < VEC; ++i) y[i] += p[i];
        });
      });
    }
  }

 private:
  // A bias of another type than the weight.
  LIGER_DEVICE void add(float (&y)[VEC], int64_t at) const {
    float bias[VEC];
    load_any(bias, a.bias.data, a.bias.dtype, at);
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] += bias[i];
  }
  // scale_and_shift(n, k, column) makes y of a vector of n.
  template <class F> LIGER_DEVICE void write(const Values& z, float mean, float rstd, F scale_and_shift) const {
    T* const out = opaque(static_cast<T*>(a.y.data) + (row * a.y.stride + columns.first));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float y[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        y[i] = (Centered ? z[k][i] - mean : z[k][i]) * rstd;
        if (!Centered && a.round_normalized) y[i] = round_to<T>(y[i]);
      }
      scale_and_shift(y, k, columns.first + k * columns.step);
      Packed<T, VEC> packed;
      packed.set(y);
      gpu::store<Hint::stream>(out + k * columns.step, packed);
    }
  }
};

template <class T, int VEC, int K, bool Centered, bool Usual> struct NormForwardRegisters {
  using Args = NormForwardArgs;
  using Tile = NormTile<T, VEC, K, Centered, Usual>;
  static constexpr int max_threads = launch::row_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(a.threads_per_row);
    const int64_t row = group.first_row();
    const bool live = row < a.rows;
    const Tile tile{a, {group.index, group.threads_per_row, 0, live ? a.cols : 0}, row};
    typename Tile::Values z, weight, bias;
    tile.load_input(z);
    tile.load_weight(weight);
    float mean = 0;
    if constexpr (Centered) {
      mean = group.sum(tile.sum(z)) / float(a.cols);  // divided: exact for a constant row
      widen_again(z);
    }
    const float rstd = fast_rsqrt(group.sum(tile.squares(z, mean)) * a.inverse_cols + a.eps);
    widen_again(z);
    if (live && group.index == 0) {
      a.rstd[row] = rstd;
      if constexpr (Centered) a.mean[row] = mean;
    }
    tile.load_bias(bias);
    tile.finish(z, weight, bias, mean, rstd);
  }

 private:
  // The widened values of so many vectors would spill while an exchange is under way: they are made again from the packed ones.
  LIGER_DEVICE static void widen_again(typename Tile::Values& z) {
    if constexpr (K > 4)
#pragma unroll
      for (int k = 0; k < K; ++k) forget_at_all_costs(z[k].data);
  }
};

// Persistent blocks, or clusters, of whole rows that come through a RowStream. The parameters stay in registers.
template <class T, int VEC, int K, bool Centered, bool Usual> struct NormForwardStream {
  using Args = NormForwardArgs;
  using Tile = NormTile<T, VEC, K, Centered, Usual>;
  static constexpr int max_threads = launch::cluster_threads, inputs = Centered ? 1 : 2;
  static LIGER_DEVICE void run(const Args& a) {
    if (!has_bulk_copies) return;
    RowGroupOf<max_threads> group(a.threads_per_row);
    const Columns<VEC, K> columns = warp_columns<VEC, K>(group, a.cols);
    const int64_t step = group.teams();
    int64_t row = group.first_row();
    const Rows tensors[2] = {a.x, a.residual};
    RowStream<decltype(group), T, VEC, K, inputs, 1> stream(group, {row, step, a.rows, a.cols, tensors}, a.stages, a.ring_offset);
    typename Tile::Values weight, bias;
    Tile{a, columns, row}.load_weight(weight);
    Tile{a, columns, row}.load_bias(bias);
    // All threads have as many columns; the warps' values are at most two a lane.
    const bool even = a.cols == int64_t{group.threads_per_row} * K * VEC && group.threads_per_row <= 64 * warp_width();
    for (; row < a.rows; row += step) {
      const Tile tile{a, columns, row};
      typename Tile::Values in[inputs];
      stream.take(in);
      if (inputs > 1 && a.residual.data != nullptr) tile.add_residual(in[0], in[inputs - 1]);
      float mean = 0, variance;
      if constexpr (!Centered) {
        variance = group.sum(tile.squares(in[0], 0)) * a.inverse_cols;
      } else if (even) {
        // One exchange: of two halves of as many columns, the mean and the variance of both together.
        const float own_mean = tile.sum(in[0]) / float(K * VEC);
        float pair[2] = {own_mean, tile.squares(in[0], own_mean) / float(K * VEC)};
        group.reduce(pair, [](float (&a)[2], const float (&b)[2]) {
          const float half_apart = 0.5f * (a[0] - b[0]);
          a[1] = 0.5f * (a[1] + b[1]) + half_apart * half_apart;
          a[0] = 0.5f * (a[0] + b[0]);
        });
        mean = pair[0];
        variance = pair[1];
      } else {
        float total[2] = {tile.sum(in[0]), 0};
        group.sum(total);
        mean = total[0] / float(a.cols);
        float squares[2] = {tile.squares(in[0], mean), 0};
        group.sum(squares);
        variance = squares[0] * a.inverse_cols;
      }
      const float rstd = fast_rsqrt(variance + a.eps);
      if (group.index == 0) {
        a.rstd[row] = rstd;
        if constexpr (Centered) a.mean[row] = mean;
      }
      tile.finish(in[0], weight, bias, mean, rstd);
    }
  }
};

// One block a row, any length.
template <class T, int VEC, bool Centered, bool Usual> struct NormForwardReread {
  using Args = NormForwardArgs;
  static constexpr int K = 4;
  using Tile = NormTile<T, VEC, K, Centered, Usual>;
  static constexpr int max_threads = launch::row_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const int64_t row = block_id(), batch = int64_t{block_threads()} * K * VEC;
    // Of this thread's columns so far; the mean stays 0 for RMSNorm.
    float count = 0, mean = 0, squares = 0;
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Tile tile{a, {group.index, block_threads(), begin, a.cols}, row};
      typename Tile::Values z;
      tile.load_input(z);
      if constexpr (Centered) {
        const float added = float(columns_of(tile.columns));
        if (added == 0) continue;
        const float batch_mean = tile.sum(z) / added, delta = batch_mean - mean, share = added / (count + added);
        squares += tile.squares(z, batch_mean) + delta * delta * count * share;
        mean += delta * share;
        count += added;
      } else {
        squares += tile.squares(z, 0);
      }
    }
    if constexpr (Centered) {
      const float row_mean = group.sum(count * mean) / float(a.cols);
      squares += count * (mean - row_mean) * (mean - row_mean);
      mean = row_mean;
    }
    const float rstd = fast_rsqrt(group.sum(squares) * a.inverse_cols + a.eps);
    if (group.index == 0) {
      a.rstd[row] = rstd;
      if constexpr (Centered) a.mean[row] = mean;
    }
    const bool summed = !Centered && a.residual.data != nullptr;
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Tile tile{a, {group.index, block_threads(), begin, a.cols}, row};
      typename Tile::Values z, weight, bias;
      if (summed) tile.columns.load(z, a.sum.data, row * a.sum.stride);
      else tile.load_as_t(z, a.x);
      tile.load_weight(weight);
      tile.load_bias(bias);
      tile.finish(z, weight, bias, mean, rstd);
    }
  }

 private:
  LIGER_DEVICE static int columns_of(const Columns<VEC, K>& columns) {
    int vectors = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) vectors += columns.has(k);
    return vectors * VEC;
  }
};

template <bool Centered> void norm_forward(NormForwardArgs a, Stream stream) {
  if (a.rows == 0 || a.cols == 0) return;
  const launch::DeviceProfile& device = device_profile(stream.device);
  const bool wide = aligned(a.x, a.cols) && aligned(a.residual, a.cols) && aligned(a.sum, a.cols) && aligned(a.y, a.cols) &&
                    aligned(a.weight, a.cols) && aligned(a.bias, a.cols);
  dispatch(a.y.dtype, [&](auto tag) {
    using T = std::remove_cvref_t<decltype(tag)>;
    const auto start = [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      a.inverse_cols = 1.0f / float(a.cols);
      const bool one_type = a.x.dtype == a.y.dtype && (a.residual.data == nullptr || a.residual.dtype == a.y.dtype);
      const launch::Tunable kernel = Centered          ? launch::Tunable::layer_norm
                                     : a.residual.data ? launch::Tunable::add_rms_norm
                                                       : launch::Tunable::rms_norm;
      const launch::LaunchPlan plan = launch::plan_norm_forward(device, a.rows, a.cols, VEC,
                                                                {.centered = Centered,
                                                                 .inputs = !one_type         ? 0
                                                                           : a.residual.data ? 2
                                                                                             : 1},
                                                                launch::knobs_of(device, kernel, VEC, a.rows, a.cols));
      a.threads_per_row = plan.threads_per_row;
      a.stages = plan.stages;
      a.ring_offset = plan.ring_offset;
      const auto with_params = [&](auto constant) {
        constexpr bool Usual = decltype(constant)::value;
        if constexpr (VEC > 1 && has_stream_kernels)
          if (plan.path == launch::Path::stream)
            return launch<NormForwardStream<T, VEC, launch::stream_k, Centered, Usual>>(plan, a, stream);
        if (plan.path == launch::Path::reread) return launch<NormForwardReread<T, VEC, Centered, Usual>>(plan, a, stream);
        if constexpr (VEC > 1) {  // single elements come in one size: four a thread
          if (plan.k == 1) return launch<NormForwardRegisters<T, VEC, 1, Centered, Usual>>(plan, a, stream);
          if (plan.k == 2) return launch<NormForwardRegisters<T, VEC, 2, Centered, Usual>>(plan, a, stream);
          if (plan.k == 8) return launch<NormForwardRegisters<T, VEC, 8, Centered, Usual>>(plan, a, stream);
        }
        launch<NormForwardRegisters<T, VEC, 4, Centered, Usual>>(plan, a, stream);
      };
      const bool usual = a.weight.data && a.weight.dtype == a.y.dtype && (!Centered || (a.bias.data && a.bias.dtype == a.y.dtype));
      if (VEC > 1 && usual) with_params(std::bool_constant<(VEC > 1)>{});
      else with_params(std::false_type{});
    };
    constexpr int wide_vec = 16 / int(sizeof(T));
    if (wide && a.cols % wide_vec == 0) start(std::integral_constant<int, wide_vec>{});
    else start(std::integral_constant<int, 1>{});
  });
}

}  // namespace liger::gpu
