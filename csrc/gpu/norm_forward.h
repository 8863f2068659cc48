// The forward of RMSNorm, add+RMSNorm and LayerNorm. Bound by memory: most rows are read once and written once.
//
//   y = n * (weight + offset) + bias,   n = (z - mean) * rstd,   z = x [+ residual, stored as `sum`];   RMSNorm: mean = 0
//
// NormForwardRegisters: the threads of a row hold it, up to 8 vectors each, and issue all loads before they use the first value. The number
// of threads is a power of two. For some of RMSNorm's row lengths, far from a power of two, it is any number of whole warps, so that no
// warp idles (RowWarps).
// Rows that a block cannot hold are held by a cluster of blocks, where the device has clusters. The hardware starts blocks as others end,
// which keeps the memory busier than persistent blocks do.
// NormForwardTwoPass, for longer rows: two passes by the same threads. The first computes the statistics (LayerNorm merges batches by
// Chan's formula); the second computes the result, and most of its reads hit the L2. Instructions are the second limit (H200). So there are
// separate kernel instances for parameters of the result's dtype, and few branches before a row's first load: short rows pay for each of
// them.
#pragma once
#include "gpu/device.h"
#include "gpu/row_warps.h"
#include "kernels/norms.h"
#include "launch/norms.h"

namespace liger::gpu {

// The arguments of the kernels: NormForward's fields, and values of the launch.
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
  bool as_llama = false;  // y is the rounded n times the weight, without an offset
};

using launch::NormForwardKind;

struct NormStatistics {
  float mean, rstd;  // mean: 0 for RMSNorm
};

// A thread's K vectors of a row: z, its statistics, and y. T is the type of z and y; if T is fp32, x and the residual may have other types.
// A thread keeps the row in T, which is exact and takes half the registers for 16-bit types, and widens elements to fp32 where it uses
// them.
template <class T, int VEC, int K, NormForwardKind Kind> struct NormTile {
  static constexpr bool Centered = Kind.centered;
  using Values = Packed<T, VEC>[K];
  const NormForwardArgs& a;
  const Columns<VEC, K> columns;
  const int64_t row;

  // Loads z = x [+ residual]. A sum is rounded to T, and stored in `sum`.
  LIGER_DEVICE void load_input(Values& z) const {
    load_as_t(z, a.x);
    if (!Kind.residual || (!Kind.same_dtype && a.residual.data == nullptr)) return;
    Values residual;
    load_as_t(residual, a.residual);
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

  LIGER_DEVICE float sum(const Values& z) const {
    float total = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < VEC; ++i) total += z[k][i];
    return total;
  }
  // Returns the sum of (z - mean)^2.
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
  LIGER_DEVICE void store_statistics(const NormStatistics& statistics) const {
    a.rstd[row] = statistics.rstd;
    if constexpr (Centered) a.mean[row] = statistics.mean;
  }

  // The address of y at this thread's first column.
  LIGER_DEVICE T* output() const { return opaque(static_cast<T*>(a.y.data) + (row * a.y.stride + columns.first)); }
  // Stores y = n * (weight + offset) + bias.
  template <class Parameters>
  LIGER_DEVICE void write(T* out, const Values& z, const NormStatistics& statistics, const Parameters& parameters, float offset) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float y[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        y[i] = normalized(z[k][i], statistics.mean, statistics.rstd);
        if (!Centered && a.round_normalized) y[i] = round_to<T>(y[i]);
      }
      parameters.apply(y, k, columns.first + k * columns.step, offset);
      Packed<T, VEC> packed;
      packed.set(y);
      gpu::store<Hint::stream>(out + k * columns.step, packed);
    }
  }
  // Stores y = n * weight as Llama computes it: n is rounded to T first. With both factors in T, one instruction computes two products on
  // recent GPUs. That matters for short rows, where instructions are a limit (docs/measurements.md).
  template <class Parameters> LIGER_DEVICE void write_as_llama(T* out, const Values& z, float rstd, const Parameters& parameters) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float n[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) n[i] = z[k][i] * rstd;
      Packed<T, VEC> rounded;
      rounded.set(n);
      gpu::store<Hint::stream>(out + k * columns.step, products(rounded, parameters.weight_vector(k, columns.first + k * columns.step)));
    }
  }

 private:
  // Returns (z - mean) * rstd. For 16-bit types it is one multiply-add, which rounds mean * rstd; but mean itself is rounded, too.
  LIGER_DEVICE static float normalized(float z, float mean, float rstd) {
    if constexpr (Centered && sizeof(T) == 2) return z * rstd - mean * rstd;
    else return (Centered ? z - mean : z) * rstd;
  }
};

// The weight, and LayerNorm's bias, if all of them are present and have the result's type. WithRow: the weight is loaded together with the
// row. The bias, if registers allow, is loaded before the result is computed, so that the thread waits for several loads at once.
template <class T, int VEC, int K, bool Centered, bool WithRow> struct TypedParameters {
  static constexpr bool holds_weight = WithRow, holds_bias = WithRow && Centered && K <= 4;
  const NormForwardArgs& a;
  Packed<T, VEC> weight[K], bias[K];

  LIGER_DEVICE explicit TypedParameters(const NormForwardArgs& a) : a(a) {}
  LIGER_DEVICE void load_weight(const Columns<VEC, K>& columns) {
    if constexpr (holds_weight) columns.template load<Hint::constant>(weight, a.weight.data);
  }
  LIGER_DEVICE void load_bias(const Columns<VEC, K>& columns) {
    if constexpr (holds_bias) columns.template load<Hint::constant>(bias, a.bias.data);
  }
  // The weights of vector k, which begins at column `at`.
  LIGER_DEVICE Packed<T, VEC> weight_vector(int k, int64_t at) const {
    if constexpr (holds_weight) return weight[k];
    Packed<T, VEC> w;
    gpu::load<Hint::constant>(w, static_cast<const T*>(a.weight.data) + at);
    return w;
  }
  // Computes y of vector k from n, in place.
  LIGER_DEVICE void apply(float (&n)[VEC], int k, int64_t at, float offset) const {
    const Packed<T, VEC> w = weight_vector(k, at);
    Packed<T, VEC> b = {};
    if constexpr (holds_bias) b = bias[k];
    else if constexpr (Centered) gpu::load<Hint::constant>(b, static_cast<const T*>(a.bias.data) + at);
#pragma unroll
    for (int i = 0; i < VEC; ++i) n[i] = Centered ? n[i] * w[i] + b[i] : n[i] * (w[i] + offset);
  }
  // One branch per row, not one per element.
  template <class Tile> LIGER_DEVICE void finish(const Tile& tile, const typename Tile::Values& z, const NormStatistics& statistics) const {
    T* const out = tile.output();
    if (!Centered && a.as_llama) tile.write_as_llama(out, z, statistics.rstd, *this);
    else tile.write(out, z, statistics, *this, a.offset);
  }
};

// The weight and LayerNorm's bias, each of which may be absent or have any type.
template <int VEC, bool Centered> struct AnyParameters {
  const NormForwardArgs& a;

  LIGER_DEVICE explicit AnyParameters(const NormForwardArgs& a) : a(a) {}
  template <class Columns> LIGER_DEVICE void load_weight(const Columns&) {}
  template <class Columns> LIGER_DEVICE void load_bias(const Columns&) {}
  // W: the type of the weight or, without a weight, of the bias.
  template <class W> struct Typed {
    const NormForwardArgs& a;

    LIGER_DEVICE void apply(float (&n)[VEC], int, int64_t at, float offset) const {
      Packed<W, VEC> p;
      if (a.weight.data) {
        gpu::load<Hint::constant>(p, static_cast<const W*>(a.weight.data) + at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) n[i] *= Centered ? p[i] : p[i] + offset;
      }
      if (!Centered || a.bias.data == nullptr) return;
      if (a.bias.dtype == dtype_constant<W>) {
        gpu::load<Hint::constant>(p, static_cast<const W*>(a.bias.data) + at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) n[i] += p[i];
      } else {
        float bias[VEC];
        load_any(bias, a.bias.data, a.bias.dtype, at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) n[i] += bias[i];
      }
    }
  };
  template <class Tile> LIGER_DEVICE void finish(const Tile& tile, const typename Tile::Values& z, const NormStatistics& statistics) const {
    with_dtype(a.weight.data ? a.weight.dtype : a.bias.dtype, [&](auto tag) {  // one branch per row
      tile.write(tile.output(), z, statistics, Typed<std::remove_cvref_t<decltype(tag)>>{a}, a.offset);
    });
  }
};
template <class T, int VEC, int K, NormForwardKind Kind, bool WithRow>
using NormParameters =
    std::conditional_t<Kind.same_dtype, TypedParameters<T, VEC, K, Kind.centered, WithRow>, AnyParameters<VEC, Kind.centered>>;

// Layout: the most threads of a block, which is launch::cluster_block for rows of a cluster. Or launch::whole_warps: one row per block, of
// any number of warps. Or launch::forward_lanes: rows of that many threads.
template <class T, int VEC, int K, int Layout, NormForwardKind Kind> struct NormForwardRegisters {
  static constexpr bool Centered = Kind.centered, in_warps = Layout == launch::whole_warps, in_lanes = Layout == launch::forward_lanes,
                        clusters = Layout == launch::cluster_block;
  using Args = NormForwardArgs;
  using Tile = NormTile<T, VEC, K, Kind>;
  using Parameters = NormParameters<T, VEC, K, Kind, (K <= 4 || (clusters && !Centered))>;
  using Group = std::conditional_t<in_warps, RowWarps<true>, BasicRowGroup<in_lanes ? Layout : 0, clusters>>;
  static constexpr int max_threads = launch::norm_forward_registers.instance(VEC, K, Layout).max_threads,
                       min_blocks = in_warps   ? launch::forward_warps_blocks(Kind)
                                    : in_lanes ? launch::forward_lanes_blocks
                                    : clusters ? launch::cluster_blocks(Kind)
                                               : 1;

  static LIGER_DEVICE void run(const Args& a) {
    Group group(a.threads_per_row);
    const int64_t row = group.first_row();
    const bool live = in_warps || row < a.rows;
    const Tile tile{a, {group.index, group.threads_per_row, live ? int(a.cols) : 0}, row};
    typename Tile::Values z;
    tile.load_input(z);
    Parameters parameters(a);
    parameters.load_weight(tile.columns);
    float mean = 0, variance;
    if constexpr (Centered) moments(group, tile, z, mean, variance);
    else variance = group.sum(tile.squares(z, 0)) * a.inverse_cols;
    const NormStatistics statistics{mean, fast_rsqrt(variance + a.eps)};
    widen_again(z);
    if (live && group.index == 0) tile.store_statistics(statistics);
    parameters.load_bias(tile.columns);
    parameters.finish(tile, z, statistics);
  }

 private:
  // Computes LayerNorm's mean and variance, from sums relative to the mean of the row's first VEC values.
  template <class Group>
  LIGER_DEVICE static void moments(Group& group, const Tile& tile, const typename Tile::Values& z, float& mean, float& variance) {
    using First = NormTile<T, VEC, 1, Kind>;
    typename First::Values values;
    First{tile.a, {0, 1, tile.row < tile.a.rows ? VEC : 0}, tile.row}.load_as_t(values, tile.a.x);
    mean = vector_mean(values[0]);
    held_moments(group, tile.columns, z, tile.a, mean, variance);
  }
  // Forces the compiler to widen z again. Otherwise it keeps the widened values in registers during the exchange, and spills.
  LIGER_DEVICE static void widen_again(typename Tile::Values& z) {
    if constexpr (K > 4 || (Centered && K == 4))
#pragma unroll
      for (int k = 0; k < K; ++k) forget_in_ptxas(z[k].data);
  }
};

// One block per row of any length, which reads the row twice.
template <class T, int VEC, NormForwardKind Kind> struct NormForwardTwoPass {
  static constexpr bool Centered = Kind.centered;
  using Args = NormForwardArgs;
  static constexpr int K = 4;
  using Tile = NormTile<T, VEC, K, Kind>;
  using Parameters = NormParameters<T, VEC, K, Kind, true>;
  static constexpr int max_threads = launch::norm_forward_two_pass.instance(VEC).max_threads;

  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const int64_t row = block_id(), batch = int64_t{block_threads()} * K * VEC;
    // Count, mean and sum of squared deviations of the columns that this thread has read; the mean stays 0 for RMSNorm.
    float count = 0, mean = 0, squares = 0;
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Tile tile{a, {group.index, block_threads(), begin, a.cols}, row};
      typename Tile::Values z;
      tile.load_input(z);
      if constexpr (Centered) add_batch(tile, z, count, mean, squares);
      else squares += tile.squares(z, 0);
    }
    if constexpr (Centered) {
      const float row_mean = group.sum(count * mean) / float(a.cols);
      squares += count * (mean - row_mean) * (mean - row_mean);
      mean = row_mean;
    }
    const NormStatistics statistics{mean, fast_rsqrt(group.sum(squares) * a.inverse_cols + a.eps)};
    if (group.index == 0) Tile{a, {0, 0, 0}, row}.store_statistics(statistics);
    const bool summed = Kind.residual && a.residual.data != nullptr;
    for (int64_t begin = 0; begin < a.cols; begin += batch) {
      const Tile tile{a, {group.index, block_threads(), begin, a.cols}, row};
      typename Tile::Values z;
      if (summed) tile.columns.load(z, a.sum.data, row * a.sum.stride);
      else tile.load_as_t(z, a.x);
      Parameters parameters(a);
      parameters.load_weight(tile.columns);
      parameters.load_bias(tile.columns);
      parameters.finish(tile, z, statistics);
    }
  }

 private:
  // Merges the moments of a tile into the moments so far, by Chan, Golub and LeVeque's formula.
  LIGER_DEVICE static void add_batch(const Tile& tile, const typename Tile::Values& z, float& count, float& mean, float& squares) {
    int vectors = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) vectors += tile.columns.has(k);
    if (vectors == 0) return;
    const float added = float(vectors * VEC), batch_mean = tile.sum(z) / added, delta = batch_mean - mean, share = added / (count + added);
    squares += tile.squares(z, batch_mean) + delta * delta * count * share;
    mean += delta * share;
    count += added;
  }
};

// Returns whether this instance is compiled for results of type T and for this kind.
template <class T, NormForwardKind Kind> constexpr bool norm_forward_fits(const launch::Instance& instance) {
  return fits<T>(instance) && launch::norm_forward_has(Kind, instance);
}

template <bool Centered> void norm_forward(const NormForward<Centered>& op, Stream stream) {
  NormForwardArgs a{op.rows,
                    op.cols,
                    op.x,
                    op.residual,
                    op.sum,
                    op.y,
                    op.weight,
                    op.bias,
                    static_cast<float*>(op.mean),
                    static_cast<float*>(op.rstd),
                    float(op.eps),
                    float(op.offset),
                    op.round_normalized};
  a.inverse_cols = 1.0f / float(a.cols);
  a.as_llama = a.round_normalized && a.offset == 0;
  for (const launch::Launch& config : launch::op_launches(device_profile(stream.device), op)) {
    const NormForwardKind kind = launch::norm_forward_kind(op, config.instance.vec);
    a.threads_per_row = config.plan.threads_per_row;
    dispatch(a.y.dtype, [&](auto tag) {
      using T = decltype(tag);
      const auto launch_kind = [&]<NormForwardKind Kind>() {
        constexpr auto fitting = norm_forward_fits<T, Kind>;
        if (config.is(launch::norm_forward_two_pass))
          with_instance<launch::norm_forward_two_pass, fitting>(
              config, [&]<Instance I>() { launch<NormForwardTwoPass<T, I.vec, Kind>>(config, a, stream); });
        else
          with_instance<launch::norm_forward_registers, fitting>(
              config, [&]<Instance I>() { launch<NormForwardRegisters<T, I.vec, I.k, I.row_layout, Kind>>(config, a, stream); });
      };
      // LayerNorm has no residual. Kernels for parameters of any dtype decide at run time whether there is a residual.
      if (!kind.same_dtype) launch_kind.template operator()<NormForwardKind{Centered, !Centered, false}>();
      else if (Centered || !kind.residual) launch_kind.template operator()<NormForwardKind{Centered, false, true}>();
      else launch_kind.template operator()<NormForwardKind{Centered, !Centered, true}>();
    });
  }
}

}  // namespace liger::gpu
