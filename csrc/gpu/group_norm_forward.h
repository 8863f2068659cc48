// The forward of GroupNorm. Bound by memory: where registers hold a group (GroupNormRegisters), or registers and shared memory of a block
// or of a cluster of blocks do (GroupNormHeld), x is read once and y is written once. Longer groups are cut into parts, one per block, so
// that a few groups fill the device. One kernel computes the mean and the sum of squared deviations of each part (GroupNormMoments). A
// second one merges the moments of a group's parts and reads the parts again (GroupNormApply), in the opposite order, since the L2 still
// has the parts that were read last.
//
// A vector takes weight and bias of the channel in which it begins. Where channels are not whole vectors, it may end in the next channel,
// whose parameters are then loaded, too.
#pragma once
#include "gpu/group_norm.h"
#include "gpu/held_vectors.h"

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
  int threads_per_row = 0, shared_offset = 0;  // shared_offset: where GroupNormHeld's vectors in shared memory begin
};

// Weight and bias of a channel.
struct WeightAndBias {
  float weight, bias;
};
// For write_normalised(): the parameters of a row's channels, from a ChannelTable.
struct TableParameters {
  const GroupNormRow& shape;
  const ChannelTable<2>& table;
  int first;  // in the table: the row's first channel
  LIGER_DEVICE int channel(int64_t column) const { return shape.by_channel(int(column)); }
  LIGER_DEVICE WeightAndBias at(int nth) const { return {table(0, first + nth), table(1, first + nth)}; }
  LIGER_DEVICE WeightAndBias vector_parameters(int, int64_t column) const { return at(channel(column)); }
};
// The same from memory; those of a thread's K vectors are loaded first.
template <int VEC, int K> struct LoadedParameters {
  const GroupNormForwardArgs& a;
  int64_t first_channel;
  float weight[K], bias[K];
  LIGER_DEVICE LoadedParameters(const GroupNormForwardArgs& a, int64_t first_channel, const Columns<VEC, K>& columns)
      : a(a), first_channel(first_channel) {
    const auto channel_at = [&](int64_t column) { return first_channel + channel(column); };
    load_channels(weight, a.weight, 1, columns, channel_at);
    load_channels(bias, a.bias, 0, columns, channel_at);
  }
  LIGER_DEVICE int64_t channel(int64_t column) const { return quotient(column, a.shape.channel); }  // of the row
  LIGER_DEVICE WeightAndBias at(int64_t nth) const {
    return {a.weight.data ? load_one(a.weight.data, a.weight.dtype, first_channel + nth) : 1,
            a.bias.data ? load_one(a.bias.data, a.bias.dtype, first_channel + nth) : 0};
  }
  LIGER_DEVICE WeightAndBias vector_parameters(int k, int64_t) const { return {weight[k], bias[k]}; }
};

// y = n * weight + bias of a channel, as a function of x. For 16-bit types it is one multiply-add, which rounds mean * rstd; but mean
// itself is rounded, too.
template <class T> struct Normalise {
  static constexpr bool one_step = sizeof(T) == 2;
  float mean, scale, bias;
  LIGER_DEVICE Normalise(float mean, float rstd, const WeightAndBias& channel)
      : mean(mean), scale(rstd * channel.weight), bias(one_step ? fmaf(-mean, scale, channel.bias) : channel.bias) {}
  LIGER_DEVICE float operator()(float x) const { return fmaf(one_step ? x : x - mean, scale, bias); }
};

// Stores y of this thread's vectors.
template <class T, int VEC, int K, class Parameters>
LIGER_DEVICE void write_normalised(const GroupNormForwardArgs& a, const Columns<VEC, K>& columns, const Packed<T, VEC> (&x)[K], int64_t row,
                                   float mean, float rstd, const Parameters& parameters) {
  T* const to = opaque(static_cast<T*>(a.y) + (row * a.shape.cols + columns.first));
  const bool split = VEC > 1 && a.shape.channel % VEC != 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float y[VEC];
    const int64_t column = columns.first + k * columns.step;
    const Normalise<T> first(mean, rstd, parameters.vector_parameters(k, column));
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] = first(x[k][i]);
    if (split) {
      const int64_t nth = parameters.channel(column), first_elements = (nth + 1) * a.shape.channel - column;
      if (first_elements < VEC) {  // the vector's other elements are in the next channel
        const Normalise<T> next(mean, rstd, parameters.at(nth + 1));
#pragma unroll
        for (int i = 0; i < VEC; ++i)
          if (i >= first_elements) y[i] = next(x[k][i]);
      }
    }
    Packed<T, VEC> packed;
    packed.set(y);
    store<Hint::stream>(to + k * columns.step, packed);
  }
}

template <class T, int VEC, int K> struct GroupNormRegisters {
  using Args = GroupNormForwardArgs;
  static constexpr int max_threads = launch::group_norm_registers.instance(VEC, K).max_threads, min_waves = max_threads / 256;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(a.threads_per_row);
    const int64_t row = group.first_row();
    const bool live = row < a.rows;
    const Columns<VEC, K> columns(group.index, group.threads_per_row, live ? int(a.shape.cols) : 0);
    Packed<T, VEC> x[K];
    columns.template load<Hint::stream>(x, a.x, row * a.shape.cols);
    Packed<T, VEC> first[1];  // the row's first vector: its mean is held_moments()'s estimate
    Columns<VEC, 1>(0, 1, live ? VEC : 0).load(first, a.x, row * a.shape.cols);
    const int channels = int(a.shape.channels);
    const ChannelTable<2> table(group.rows_per_block() * channels, RowGroup::shared_bytes<2>(), {a.weight, a.bias}, {1, 0},
                                block_channels(a.shape, row - group.row_in_block, a.rows));
    float mean = vector_mean(first[0]), variance;
    const auto for_each = [&](auto f) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (columns.has(k)) f(x[k]);
    };
    held_moments<T, VEC, sizeof(T) == 4>(group, for_each, a.shape, mean, variance);
    const float rstd = fast_rsqrt(variance + a.eps);
    if constexpr (K >= 4)
#pragma unroll
      for (int k = 0; k < K; ++k) forget_in_ptxas(x[k].data);  // widened values would spill
    if (live && group.index == 0) {
      a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    block_barrier();
    write_normalised(a, columns, x, row, mean, rstd, TableParameters{a.shape, table, group.row_in_block * channels});
  }
};

// A row per block, or per cluster. A thread has K vectors in registers and the others in shared memory.
template <class T, int VEC, int K> struct GroupNormHeld {
  using Args = GroupNormForwardArgs;
  static constexpr int max_threads = launch::group_norm_held.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    BasicRowGroup<0, true> group(a.threads_per_row);
    const int64_t row = group.first_row();
    HeldVectors<T, VEC, K> held{{group.index, group.threads_per_row, int(a.shape.cols)}, a.shared_offset};
    const T* const begin = opaque(static_cast<const T*>(a.x) + row * a.shape.cols);
    const auto at = [&](int, int64_t offset) { return begin + (held.columns.first + offset); };
    held.template load<Hint::stream>(at);
    held.template copy_remaining_to_shared<Hint::stream>(at);
    Packed<T, VEC> first;
    load(first, begin);
    const int64_t first_channel = a.shape.first_channel(row);
    const ChannelTable<2> table(int(a.shape.channels), group.template shared_bytes<2>(cluster_blocks()), {a.weight, a.bias}, {1, 0},
                                [&](int i) { return first_channel + i; });
    float mean = vector_mean(first), variance;
    const auto for_each = [&](auto f) { held.for_each([&](int, const Packed<T, VEC>& x) { f(x); }); };
    held_moments<T, VEC, sizeof(T) == 4>(group, for_each, a.shape, mean, variance);
    const float rstd = fast_rsqrt(variance + a.eps);
    held.forget_widened();
    if (group.index == 0) {
      a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    block_barrier();
    held.template for_each_batch<K>([&](const Columns<VEC, K>& columns, const Packed<T, VEC>(&x)[1][K]) {
      write_normalised(a, columns, x[0], row, mean, rstd, TableParameters{a.shape, table, 0});
    });
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
    let_next_kernel_start();
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
    const int64_t row = part.row;
    const auto batch = [&](int64_t begin) { return Columns<VEC, K>(group.index, block_threads(), begin, part.end); };
    Packed<T, VEC> x[K];  // the first batch is loaded before the moments, which the previous kernel computes
    batch(part.begin).template load<Hint::stream>(x, a.x, row * a.shape.cols);
    wait_for_previous_kernel();
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
    for (int64_t begin = part.begin; begin < part.end;) {
      const Columns<VEC, K> columns = batch(begin);
      write_normalised(a, columns, x, row, moments.mean, rstd, LoadedParameters<VEC, K>(a, a.shape.first_channel(row), columns));
      begin += int64_t{block_threads()} * K * VEC;
      if (begin < part.end) batch(begin).template load<Hint::stream>(x, a.x, row * a.shape.cols);
    }
  }
};

}  // namespace liger::gpu
