// The forward of RMSNorm, add+RMSNorm and LayerNorm. Bound by memory: each row is read once and written once.
//
//   y = n * (weight + offset) + bias,   n = (z - mean) * rstd,   z = x [+ residual, stored as `sum`];   RMSNorm: mean = 0
//
// Registers path: the threads of a row hold it, up to 8 vectors each, all loads in flight before the first use. What a block cannot hold,
// the blocks of a cluster do, where the device has them; the hardware starts them as others end, which keeps the memory busier than
// persistent ones do. Re-read path, for longer rows: one pass for the statistics (LayerNorm merges batches by Chan's formula), a second
// for the result, both by the same thread, so that the second mostly hits the L2. On an H200 instructions are the second limit: there
// are kernels of their own for the usual parameters, and short rows pay for every branch before their first load.
#pragma once
#include "gpu/device.h"
#include "gpu/rows.h"
#include "kernels/norms.h"
#include "launch/norms.h"

namespace liger::gpu {

// NormForward as the kernels of both norms take it.
struct NormForwardArgs {
  int64_t rows, cols;
  Rows x, residual;
  MutableRows sum, y;
  Vector weight, bias;
  float *mean, *rstd;
  float eps, offset;
  bool round_normalized;
  float inverse_cols = 0;
  int threads_per_row = 0;
  bool as_llama = false;  // the result is the rounded n times the weight
};

// Which variant of the kernels. usual: the weight, and LayerNorm's bias, are there and have the result's dtype; otherwise each may be
// missing or have any dtype, which is decided at run time. two: two tensors are read, x and a residual; if not usual, there may be a
// residual.
struct NormKind {
  bool centered, usual, two;
};

// What the kernels of all paths do with a thread's K vectors of a row. T is the type of what is normalised, and of y; if T is fp32, x and
// the residual may have other types. A thread keeps the row in T, which is exact and takes half the registers for 16-bit types, and widens
// elements to fp32 where it uses them. Early: the weight is loaded together with the row, so that the thread waits for both at once.
template <class T, int VEC, int K, NormKind Kind, bool Early> struct NormTile {
  static constexpr bool Centered = Kind.centered, Usual = Kind.usual;
  using Values = Packed<T, VEC>[K];
  const NormForwardArgs& a;
  const Columns<VEC, K> columns;
  const int64_t row;

  // Loads z = x [+ residual]. A sum is rounded to T, as its copy in memory is.
  LIGER_DEVICE void load_input(Values& z) const {
    load_as_t(z, a.x);
    if (!Kind.two || (!Usual && a.residual.data == nullptr)) return;
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
  // (z - mean) * rstd as one multiply-add, z * rstd - mean * rstd, for 16-bit types. It rounds mean * rstd, but mean itself is rounded,
  // too.
  static constexpr bool one_step = Centered && sizeof(T) == 2;
  static constexpr bool early_weight = Usual && Early, early_bias = early_weight && Centered && K <= 4;
  LIGER_DEVICE void load_weight(Values& weight) const {
    if constexpr (early_weight) columns.template load<Hint::constant>(weight, a.weight.data);
  }
  LIGER_DEVICE void load_bias(Values& bias) const {
    if constexpr (early_bias) columns.template load<Hint::constant>(bias, a.bias.data);
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
  // Computes and stores y from z. weight and bias hold values if early_weight and early_bias; otherwise they are loaded here.
  LIGER_DEVICE void finish(const Values& z, const Values& weight, const Values& bias, float mean, float rstd) const {
    if constexpr (Usual) {
      const auto scale_and_shift = [&](float (&y)[VEC], int k, int64_t at, float offset) {
        Packed<T, VEC> w, b = {};
        if constexpr (early_weight) w = weight[k];
        else gpu::load<Hint::constant>(w, static_cast<const T*>(a.weight.data) + at);
        if constexpr (early_bias) b = bias[k];
        else if constexpr (Centered) gpu::load<Hint::constant>(b, static_cast<const T*>(a.bias.data) + at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) y[i] = Centered ? y[i] * w[i] + b[i] : y[i] * (w[i] + offset);
      };
      // One branch per row, not one per element.
      if (!Centered && a.as_llama) write<true>(z, mean, rstd, [&](auto& y, int k, int64_t at) { scale_and_shift(y, k, at, 0); });
      else write<false>(z, mean, rstd, [&](auto& y, int k, int64_t at) { scale_and_shift(y, k, at, a.offset); });
    } else {
      with_dtype(a.weight.data ? a.weight.dtype : a.bias.dtype, [&](auto tag) {  // again one branch per row
        using W = std::remove_cvref_t<decltype(tag)>;
        write<false>(z, mean, rstd, [&](float (&y)[VEC], int, int64_t at) {
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
  // Adds a bias whose dtype is not the weight's.
  LIGER_DEVICE void add(float (&y)[VEC], int64_t at) const {
    float bias[VEC];
    load_any(bias, a.bias.data, a.bias.dtype, at);
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] += bias[i];
  }
  // Normalises, and calls scale_and_shift(n, k, column), which turns the vector n into y. Rounded: n is always rounded to T before that;
  // otherwise a.round_normalized decides.
  template <bool Rounded, class F> LIGER_DEVICE void write(const Values& z, float mean, float rstd, F scale_and_shift) const {
    T* const out = opaque(static_cast<T*>(a.y.data) + (row * a.y.stride + columns.first));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float y[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        y[i] = one_step ? z[k][i] * rstd - mean * rstd : (Centered ? z[k][i] - mean : z[k][i]) * rstd;
        if (!Centered && (Rounded || a.round_normalized)) y[i] = round_to<T>(y[i]);
      }
      scale_and_shift(y, k, columns.first + k * columns.step);
      Packed<T, VEC> packed;
      packed.set(y);
      gpu::store<Hint::stream>(out + k * columns.step, packed);
    }
  }
};

// Threads: the launch bound. The instances for clusters have a smaller bound, so that a thread has registers for more than the row.
template <class T, int VEC, int K, int Threads, NormKind Kind> struct NormForwardRegisters {
  static constexpr bool Centered = Kind.centered, clusters = Threads < launch::row_threads;
  using Args = NormForwardArgs;
  using Tile = NormTile<T, VEC, K, Kind, (K <= 4 || (clusters && !Centered))>;
  static constexpr int max_threads = launch::norm_forward_registers.instance(VEC, K, Threads).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroupOf<0, clusters> group(a.threads_per_row);
    const int64_t row = group.first_row();
    const bool live = row < a.rows;
    const Tile tile{a, {group.index, group.threads_per_row, live ? int(a.cols) : 0}, row};
    typename Tile::Values z, weight, bias;
    tile.load_input(z);
    tile.load_weight(weight);
    float mean = 0, variance;
    if constexpr (!Centered) {
      variance = group.sum(tile.squares(z, 0)) * a.inverse_cols;
    } else {
      statistics(group, tile, z, mean, variance);
    }
    const float rstd = fast_rsqrt(variance + a.eps);
    widen_again(z);
    if (live && group.index == 0) {
      a.rstd[row] = rstd;
      if constexpr (Centered) a.mean[row] = mean;
    }
    tile.load_bias(bias);
    tile.finish(z, weight, bias, mean, rstd);
  }

 private:
  // LayerNorm's mean and variance, by sums relative to the mean of the row's first few values.
  template <class Group>
  LIGER_DEVICE static void statistics(Group& group, const Tile& tile, const typename Tile::Values& z, float& mean, float& variance) {
    const NormForwardArgs& a = tile.a;
    using First = NormTile<T, VEC, 1, Kind, false>;
    typename First::Values values;
    First{a, {0, 1, tile.row < a.rows ? VEC : 0}, tile.row}.load_as_t(values, a.x);
    mean = mean_of(values[0]);
    held_moments(group, tile.columns, z, a, mean, variance);
  }
  // The compiler would keep the widened values of z in registers during the exchange, and spill. This makes it widen them again.
  LIGER_DEVICE static void widen_again(typename Tile::Values& z) {
    if constexpr (K > 4 || (Centered && K == 4))
#pragma unroll
      for (int k = 0; k < K; ++k) forget_at_all_costs(z[k].data);
  }
};

// One block per row, of any length; the row is read twice.
template <class T, int VEC, NormKind Kind> struct NormForwardReread {
  static constexpr bool Centered = Kind.centered;
  using Args = NormForwardArgs;
  static constexpr int K = 4;
  using Tile = NormTile<T, VEC, K, Kind, true>;
  static constexpr int max_threads = launch::norm_forward_reread.instance(VEC).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const int64_t row = block_id(), batch = int64_t{block_threads()} * K * VEC;
    // Number, mean and sum of squared distances of the columns that this thread has seen; the mean stays 0 for RMSNorm.
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
    const bool summed = Kind.two && a.residual.data != nullptr;
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

// Is this instance compiled for results of type T and for this kind?
template <class T, NormKind Kind> constexpr bool norm_forward_fits(const launch::Instance& of) {
  return fits<T>(of) && launch::norm_forward_has({Kind.centered, Kind.two, Kind.usual}, of);
}

template <bool Centered> void norm_forward(const NormForward<Centered>& of, Stream stream) {
  NormForwardArgs a{of.rows,
                    of.cols,
                    of.x,
                    of.residual,
                    of.sum,
                    of.y,
                    of.weight,
                    of.bias,
                    static_cast<float*>(of.mean),
                    static_cast<float*>(of.rstd),
                    float(of.eps),
                    float(of.offset),
                    of.round_normalized};
  if (a.rows == 0 || a.cols == 0) return;
  const bool wide = aligned(a.x, a.cols) && aligned(a.residual, a.cols) && aligned(a.sum, a.cols) && aligned(a.y, a.cols) &&
                    aligned(a.weight, a.cols) && aligned(a.bias, a.cols);
  const int wide_vec = 16 / int(size_of(a.y.dtype)), vec = wide && a.cols % wide_vec == 0 ? wide_vec : 1;
  const bool two = a.residual.data != nullptr;
  const bool usual = vec > 1 && a.weight.data && a.weight.dtype == a.y.dtype && (!Centered || (a.bias.data && a.bias.dtype == a.y.dtype));
  const launch::Launch made = launch::norm_forward(device_profile(stream.device), a.rows, a.cols, vec, {Centered, two, usual});
  a.inverse_cols = 1.0f / float(a.cols);
  a.as_llama = a.round_normalized && a.offset == 0;
  a.threads_per_row = made.plan.threads_per_row;
  dispatch(a.y.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto of_kind = [&]<NormKind Kind>() {
      constexpr auto fitting = norm_forward_fits<T, Kind>;
      if (made.of(launch::norm_forward_reread))
        with_instance<launch::norm_forward_reread, fitting>(
            made, [&]<Instance I>() { launch<NormForwardReread<T, I.vec, Kind>>(made, a, stream); });
      else
        with_instance<launch::norm_forward_registers, fitting>(
            made, [&]<Instance I>() { launch<NormForwardRegisters<T, I.vec, I.k, I.threads, Kind>>(made, a, stream); });
    };
    if (!usual) of_kind.template operator()<NormKind{Centered, false, !Centered}>();
    else if (Centered || !two) of_kind.template operator()<NormKind{Centered, true, false}>();
    else of_kind.template operator()<NormKind{Centered, true, !Centered}>();
  });
}

}  // namespace liger::gpu
