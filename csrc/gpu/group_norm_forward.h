// The forward of GroupNorm. Bound by memory: where the threads of a block, or of a cluster of blocks, hold a group (up to 64 elements of a
// 16-bit type per thread), x is read once and y is written once (GroupNormRegisters). Longer groups are cut into parts, one per block, so
// that a few groups fill the device. One kernel computes the mean and the sum of squared deviations of each part (GroupNormMoments). A
// second one merges the moments of a group's parts and reads the parts again (GroupNormApply), in the opposite order, since the L2 still
// has the parts that were read last.
//
// A vector takes weight and bias of the channel in which it begins. Where channels are not whole vectors, it may end in the next channel,
// whose parameters are then loaded, too.
#pragma once
#include "gpu/group_norm.h"

namespace liger::gpu {

struct GroupNormForwardArgs {
  int64_t rows;
  GroupNormRow shape;
  const void* x;
  void* y;
  Vector weight, bias;
  float *mean, *rstd;
  float eps;
  float* partial;  // [rows, parts, 2]: mean, and sum of (x - mean)^2
  launch::RowParts parts;
  int threads_per_row = 0;
};

// Stores y of this thread's vectors. channel_at(column) returns the channel in which a vector begins.
template <class T, int VEC, int K, class F>
LIGER_DEVICE void write_normalised(const GroupNormForwardArgs& a, const Columns<VEC, K>& columns, const Packed<T, VEC> (&x)[K], int64_t row,
                                   float mean, float rstd, const float (&weight)[K], const float (&bias)[K], F channel_at) {
  T* const to = opaque(static_cast<T*>(a.y) + (row * a.shape.cols + columns.first));
  const bool split = VEC > 1 && a.shape.channel % VEC != 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float y[VEC];
    const float scale = rstd * weight[k];
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] = fmaf(x[k][i] - mean, scale, bias[k]);
    if (split) {
      const int64_t column = columns.first + k * columns.step, channel = channel_at(column);
      const int64_t first_elements =
          (channel - a.shape.first_channel(row) + 1) * a.shape.channel - column;  // the vector's elements in its first channel
      if (first_elements < VEC) {
        const float next_scale = rstd * (a.weight.data ? load_one(a.weight.data, a.weight.dtype, channel + 1) : 1);
        const float next_bias = a.bias.data ? load_one(a.bias.data, a.bias.dtype, channel + 1) : 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i)
          if (i >= first_elements) y[i] = fmaf(x[k][i] - mean, next_scale, next_bias);
      }
    }
    Packed<T, VEC> packed;
    packed.set(y);
    store<Hint::stream>(to + k * columns.step, packed);
  }
}

template <class T, int VEC, int K> struct GroupNormRegisters {
  using Args = GroupNormForwardArgs;
  static constexpr int max_threads = launch::group_norm_registers.instance(VEC, K).max_threads,
                       min_blocks = VEC > 1 && K == launch::group_norm_k ? 2 : 1, min_waves = max_threads / 256;
  static constexpr int Together = K < 4 ? K : 4;  // vectors whose parameters are loaded together
  // True: the parameters are loaded with the row, before its moments are computed, so that the thread waits for both at once.
  static constexpr bool with_row = VEC == 1 || K < 4;
  static LIGER_DEVICE void run(const Args& a) {
    BasicRowGroup<0, (VEC > 1 && K == launch::group_norm_k)> group(a.threads_per_row);
    const int64_t row = group.first_row(), first_channel = a.shape.first_channel(row);
    const bool live = row < a.rows;
    const Columns<VEC, K> columns(group.index, group.threads_per_row, live ? int(a.shape.cols) : 0);
    Packed<T, VEC> x[K];
    columns.template load<Hint::stream>(x, a.x, row * a.shape.cols);
    Packed<T, VEC> first[1];  // the row's first vector: its mean is held_moments()'s estimate
    Columns<VEC, 1>(0, 1, live ? VEC : 0).load(first, a.x, row * a.shape.cols);
    float mean = vector_mean(first[0]), variance;
    const auto channel_at = [&](int64_t column) { return first_channel + a.shape.by_channel(int(column)); };
    float weight[Together], bias[Together];
    const auto load_parameters = [&](const Columns<VEC, Together>& some) {
      load_channels(weight, a.weight, 1, some, channel_at);
      load_channels(bias, a.bias, 0, some, channel_at);
    };
    if constexpr (with_row) load_parameters(columns);
    held_moments<sizeof(T) == 4>(group, columns, x, a.shape, mean, variance);
    const float rstd = fast_rsqrt(variance + a.eps);
    if constexpr (K >= 4)
#pragma unroll
      for (int k = 0; k < K; ++k) forget_in_ptxas(x[k].data);  // widened values would spill
    if (live && group.index == 0) {
      a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    if constexpr (with_row) {
      write_normalised(a, columns, x, row, mean, rstd, weight, bias, channel_at);
    } else {
#pragma unroll
      for (int k = 0; k < K; k += Together) {
        const Columns<VEC, Together> some = columns.template from<Together>(k);
        load_parameters(some);
        write_normalised(a, some, reinterpret_cast<const Packed<T, VEC>(&)[Together]>(x[k]), row, mean, rstd, weight, bias, channel_at);
      }
    }
  }
};

// Count, mean and sum of squared deviations from the mean (Chan, Golub and LeVeque: Algorithms for Computing the Sample Variance, 1983).
struct Moments {
  float count = 0, mean = 0, squares = 0;

  LIGER_DEVICE void join(float more, float other_mean, float other_squares) {
    if (more == 0) return;
    const float delta = other_mean - mean, share = more / (count + more);
    squares += other_squares + delta * delta * count * share;
    mean += delta * share;
    count += more;
  }
  template <class T, int VEC, int K> LIGER_DEVICE void add(const Columns<VEC, K>& columns, const Packed<T, VEC> (&x)[K]) {
    float sum = 0, batch_squares = 0;
    int vectors = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      vectors += columns.has(k);
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum += x[k][i];
    }
    const float here = float(vectors * VEC), batch_mean = vectors ? sum / here : 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k))
#pragma unroll
        for (int i = 0; i < VEC; ++i) batch_squares += (x[k][i] - batch_mean) * (x[k][i] - batch_mean);
    join(here, batch_mean, batch_squares);
  }
  // Replaces this thread's mean and squares by those of all threads of the block, which have `total` elements together.
  LIGER_DEVICE void merge(RowGroup& group, float total) {
    const float all = group.sum(count * mean) / total;
    squares = group.sum(squares + count * (mean - all) * (mean - all));
    mean = all;
  }
};

template <class T, int VEC> struct GroupNormMoments {
  using Args = GroupNormForwardArgs;
  static constexpr int K = launch::group_norm_part_k, max_threads = launch::group_norm_moments.instance(VEC).max_threads,
                       min_blocks = launch::group_norm_part_blocks;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const RowPart part(a.parts, block_id(), a.shape.cols);
    Moments moments;
    for (int64_t begin = part.begin; begin < part.end; begin += int64_t{block_threads()} * K * VEC) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, part.end);
      Packed<T, VEC> x[K];
      columns.load(x, a.x, part.row * a.shape.cols);
      moments.add(columns, x);
    }
    moments.merge(group, float(part.end - part.begin));
    if (group.index == 0) {
      a.partial[2 * block_id()] = moments.mean;
      a.partial[2 * block_id() + 1] = moments.squares;
    }
  }
};

template <class T, int VEC> struct GroupNormApply {
  using Args = GroupNormForwardArgs;
  static constexpr int K = launch::group_norm_part_k, max_threads = launch::group_norm_apply.instance(VEC).max_threads,
                       min_blocks = launch::group_norm_part_blocks;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const RowPart part(a.parts, grid_blocks() - 1 - block_id(), a.shape.cols);
    const int64_t row = part.row, first_channel = a.shape.first_channel(row);
    Moments moments;
    for (int64_t nth = group.index; nth < a.parts.per_row; nth += block_threads()) {
      const float* const partial = a.partial + 2 * (row * a.parts.per_row + nth);
      moments.join(float(RowPart::part_end(a.parts, nth, a.shape.cols) - RowPart::part_begin(a.parts, nth)), partial[0], partial[1]);
    }
    moments.merge(group, float(a.shape.cols));
    const float rstd = fast_rsqrt(moments.squares * a.shape.inverse_cols + a.eps);
    if (part.part == 0 && group.index == 0) {
      a.mean[row] = moments.mean;
      a.rstd[row] = rstd;
    }
    const auto channel_at = [&](int64_t column) { return first_channel + quotient(column, a.shape.channel); };
    for (int64_t begin = part.begin; begin < part.end; begin += int64_t{block_threads()} * K * VEC) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, part.end);
      Packed<T, VEC> x[K];
      columns.template load<Hint::stream>(x, a.x, row * a.shape.cols);
      float weight[K], bias[K];
      load_channels(weight, a.weight, 1, columns, channel_at);
      load_channels(bias, a.bias, 0, columns, channel_at);
      write_normalised(a, columns, x, row, moments.mean, rstd, weight, bias, channel_at);
    }
  }
};

}  // namespace liger::gpu
