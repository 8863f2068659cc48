// The backward of GroupNorm. Bound by memory: where registers hold a group of dy and x (GroupNormBackwardRegisters), or registers and
// shared memory of a block or of a cluster of blocks do (GroupNormBackwardHeld), both are read once and dx is written once. Longer groups
// are cut into parts, each of which lies in one channel or has whole
// channels: one kernel computes the sums of each part (GroupNormBackwardSums), and a second one reads the parts again and writes dx
// (GroupNormBackwardApply).
//
//   n = (x - mean) * rstd,  g = dy * weight[channel],  dx = rstd * (g - mean(g) - n * mean(g * n))
//   dweight[channel] = sum of dy * n,  dbias[channel] = sum of dy
//
// A vector lies in one channel. Its sums of dy * n and of dy, multiplied by the weight, are terms of the group's means. Without the weight
// they are terms of the channel's sums, which a block adds up in a fixed order. Each sample has partial rows with the sums of all channels,
// one for each of the blocks that may share a channel, and column_sum.h adds up the partial rows.
#pragma once
#include "gpu/group_norm.h"
#include "gpu/held_vectors.h"

namespace liger::gpu {

struct GroupNormBackwardArgs {
  int64_t rows;
  GroupNormRow shape;
  const void *dy, *x;
  void* dx;  // or nullptr
  Vector weight;
  const float *mean, *rstd;
  float* row_sums;  // [rows, parts, 2]: sums of g * n and of g
  float* partial;  // [partial rows, 2, channels of a sample], or nullptr: neither dweight nor dbias is computed
  launch::RowParts parts;
  int threads_per_row = 0, shared_offset = 0;  // shared_offset: where GroupNormBackwardHeld's vectors in shared memory begin

  // Stores a channel's sums in the nth of a sample's `rows` partial rows. channel: its number in the sample.
  LIGER_DEVICE void store_partial(int64_t sample, int64_t rows, int64_t nth, int64_t channel, const float (&sums)[2]) const {
    const int64_t all = shape.groups * shape.channels;
    float* const to = partial + (sample * rows + nth) * 2 * all + channel;
    to[0] = sums[0];
    to[all] = sums[1];
  }
};

// Returns the sums of dy * n and of dy over one vector. For 16-bit types the sum of dy * x takes the place of the sum of dy * (x - mean),
// as in PyTorch: mean itself is rounded, too.
template <class T, int VEC>
LIGER_DEVICE Vec<float, 2> vector_sums(const Packed<T, VEC>& dy, const Packed<T, VEC>& x, float mean, float rstd) {
  Vec<float, 2> sums = {};
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    sums[0] += dy[i] * (sizeof(T) == 2 ? x[i] : x[i] - mean);
    sums[1] += dy[i];
  }
  if constexpr (sizeof(T) == 2) sums[0] -= mean * sums[1];
  sums[0] *= rstd;
  return sums;
}

// Stores dx of this thread's vectors. sums: the row's sums of g * n and of g.
template <class T, int VEC, int K>
LIGER_DEVICE void write_gradient(const GroupNormBackwardArgs& a, const Columns<VEC, K>& columns, const Packed<T, VEC> (&dy)[K],
                                 const Packed<T, VEC> (&x)[K], int64_t row, const float (&sums)[2], float mean, float rstd,
                                 const float (&weight)[K]) {
  // For 16-bit types x - mean is not computed by itself, which rounds the product of mean and from_n; but mean itself is rounded, too.
  constexpr bool one_step = sizeof(T) == 2;
  const float from_n = rstd * rstd * (sums[0] * a.shape.inverse_cols), from_g = rstd * (sums[1] * a.shape.inverse_cols),
              constant = mean * from_n - from_g;
  T* const to = opaque(static_cast<T*>(a.dx) + (row * a.shape.cols + columns.first));
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float dx[VEC];
    const float scale = rstd * weight[k];
#pragma unroll
    for (int i = 0; i < VEC; ++i) dx[i] = dy[k][i] * scale + (one_step ? constant - x[k][i] * from_n : -(x[k][i] - mean) * from_n - from_g);
    Packed<T, VEC> packed;
    packed.set(dx);
    store<Hint::stream>(to + k * columns.step, packed);
  }
}

template <class T, int VEC, int K> struct GroupNormBackwardRegisters {
  using Args = GroupNormBackwardArgs;
  static constexpr int max_threads = launch::group_norm_backward_registers.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(a.threads_per_row);
    const int64_t row = group.first_row(), first_row = row - group.row_in_block;
    const bool live = row < a.rows;
    const int threads = group.threads_per_row, cols = int(a.shape.cols);
    const Columns<VEC, K> columns(group.index, threads, live ? cols : 0);
    Packed<T, VEC> dy[K], x[K];
    columns.template load<Hint::stream>(x, a.x, row * a.shape.cols);
    columns.template load<Hint::stream>(dy, a.dy, row * a.shape.cols);
    const float mean = live ? a.mean[row] : 0, rstd = live ? a.rstd[row] : 0;
    constexpr int table_offset = RowGroup::shared_bytes<2>();
    const int row_channels = int(a.shape.channels);
    const ChannelTable<1> table(group.rows_per_block() * row_channels, table_offset, {a.weight}, {1},
                                block_channels(a.shape, first_row, a.rows));
    const ChannelSums channels(table_offset + int(launch::channel_table_bytes(group.rows_per_block(), row_channels, 1)));
    block_barrier();
    float weight[K], sums[2] = {};
#pragma unroll
    for (int k = 0; k < K; ++k)
      weight[k] =
          columns.has(k) ? table(0, group.row_in_block * row_channels + a.shape.by_channel(int(columns.first) + k * columns.step)) : 1;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      const Vec<float, 2> pair = vector_sums(dy[k], x[k], mean, rstd);
      sums[0] += weight[k] * pair[0];
      sums[1] += weight[k] * pair[1];
      if (a.partial) channels.pairs[(group.row_in_block * K + k) * threads + group.index] = pair;
    }
    if (a.dx) {
      group.sum(sums);
#pragma unroll
      for (int k = 0; k < K; ++k) {  // widened values must not occupy registers during the reduction
        forget(dy[k].data);
        forget(x[k].data);
      }
      write_gradient(a, columns, dy, x, row, sums, mean, rstd, weight);
    }
    if (a.partial == nullptr) return;
    const int64_t rows_left = a.rows - first_row;
    const int lines = rows_left < group.rows_per_block() ? int(rows_left) : group.rows_per_block();
    channels.total(lines, K * threads, 0, row_channels, int(a.shape.channel / VEC), 0, cols / VEC,
                   [&](int line, int nth, const float (&totals)[2]) {
                     const int64_t line_row = first_row + line;
                     a.store_partial(a.shape.sample(line_row), 1, 0, a.shape.first_channel(line_row) + nth, totals);
                   });
  }
};

// A row per block, or per cluster, each block of which has a share of the row without gaps. A thread has K vectors of each tensor in
// registers and the others in shared memory, behind the pairs of sums of all its vectors.
template <class T, int VEC, int K> struct GroupNormBackwardHeld {
  using Args = GroupNormBackwardArgs;
  static constexpr int max_threads = launch::group_norm_backward_held.instance(VEC, K).max_threads;
  static LIGER_DEVICE void run(const Args& a) {
    BasicRowGroup<0, true> group(a.threads_per_row);
    const int64_t row = group.cluster_index(), first_channel = a.shape.first_channel(row);
    const bool in_cluster = group.in_cluster();
    const int cluster = in_cluster ? cluster_blocks() : 1, rank = in_cluster ? cluster_rank() : 0;
    const int cols = int(a.shape.cols), share = ((cols / VEC + cluster - 1) >> highest_bit(cluster)) * VEC, begin = rank * share,
              end = begin + share < cols ? begin + share : cols;
    const int64_t first = row * a.shape.cols + begin;
    HeldVectors<T, VEC, K, 2> held{{thread_id(), block_threads(), end - begin}, a.shared_offset};
    const T* const from[2] = {opaque(static_cast<const T*>(a.dy) + first + held.columns.first),
                              opaque(static_cast<const T*>(a.x) + first + held.columns.first)};
    const auto at = [&](int n, int64_t offset) { return from[n] + offset; };
    held.template load<Hint::stream>(at);
    held.template copy_remaining_to_shared<Hint::stream>(at);
    held.columns.first += begin;
    const float mean = a.mean[row], rstd = a.rstd[row];
    const int table_offset = group.template shared_bytes<2>(cluster);
    const ChannelTable<1> table(int(a.shape.channels), table_offset, {a.weight}, {1}, [&](int i) { return first_channel + i; });
    const ChannelSums channels(table_offset + int(launch::channel_table_bytes(1, a.shape.channels, 1)));
    const auto weights = [&]<int N>(float (&weight)[N], const Columns<VEC, N>& columns) {
#pragma unroll
      for (int k = 0; k < N; ++k) weight[k] = columns.has(k) ? table(0, a.shape.by_channel(int(columns.first) + k * columns.step)) : 1;
    };
    block_barrier();
    float sums[2] = {};
    int at_pair = thread_id();
    held.template for_each_batch<1>([&]<int N>(const Columns<VEC, N>& columns, const Packed<T, VEC>(&in)[2][N]) {
      float weight[N];
      weights(weight, columns);
#pragma unroll
      for (int k = 0; k < N; ++k, at_pair += block_threads()) {
        if (!columns.has(k)) continue;
        const Vec<float, 2> pair = vector_sums(in[0][k], in[1][k], mean, rstd);
        sums[0] += weight[k] * pair[0];
        sums[1] += weight[k] * pair[1];
        if (a.partial) channels.pairs[at_pair] = pair;
      }
    });
    if (a.dx) {
      group.sum(sums);
      held.forget_widened();
      held.template for_each_batch<1>([&]<int N>(const Columns<VEC, N>& columns, const Packed<T, VEC>(&in)[2][N]) {
        float weight[N];
        weights(weight, columns);
        write_gradient(a, columns, in[0], in[1], row, sums, mean, rstd, weight);
      });
    }
    let_next_kernel_start();
    if (a.partial == nullptr) return;
    if (begin >= end) return;
    // The blocks that share a channel have consecutive ranks. Each of them stores its sums in a partial row, and the last one zeros in the
    // partial rows that are left.
    const int length = int(a.shape.channel), from_nth = a.shape.by_channel(begin), to_nth = a.shape.by_channel(end - 1),
              partial_rows = launch::group_norm_sharing(cols / VEC, length / VEC, cluster);
    const int64_t sample = a.shape.sample(row);
    channels.total(1, 0, from_nth, to_nth - from_nth + 1, length / VEC, begin / VEC, end / VEC,
                   [&](int, int nth, const float (&totals)[2]) {
                     int at_row = rank - nth * length / share;
                     a.store_partial(sample, partial_rows, at_row, first_channel + nth, totals);
                     if ((nth + 1) * length > end) return;
#pragma unroll 1
                     while (++at_row < partial_rows) a.store_partial(sample, partial_rows, at_row, first_channel + nth, {0, 0});
                   });
  }
};

template <class T, int VEC> struct GroupNormBackwardSums {
  using Args = GroupNormBackwardArgs;
  static constexpr int K = launch::group_norm_part_k, max_threads = launch::group_norm_backward_sums.instance(VEC).max_threads,
                       min_blocks = launch::group_norm_part_blocks;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const RowPart part(a.parts, block_id(), a.shape.cols);
    const int64_t row = part.row, first_channel = a.shape.first_channel(row), part_channel = quotient(part.begin, a.shape.channel);
    const float mean = a.mean[row], rstd = a.rstd[row];
    const bool several = a.parts.span > a.shape.channel;  // the part has whole channels, and one iteration loads all of it
    const ChannelSums channels(RowGroup::shared_bytes<2>());
    float sums[2] = {}, channel_sums[2] = {};
    for (int64_t begin = part.begin; begin < part.end; begin += int64_t{block_threads()} * K * VEC) {
      const Columns<VEC, K> columns(group.index, block_threads(), begin, part.end);
      Packed<T, VEC> dy[K], x[K];
      columns.load(x, a.x, row * a.shape.cols);
      columns.load(dy, a.dy, row * a.shape.cols);
      float weight[K];
      load_channels(weight, a.weight, 1, columns, [&](int64_t column) { return first_channel + quotient(column, a.shape.channel); });
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!columns.has(k)) continue;
        const Vec<float, 2> pair = vector_sums(dy[k], x[k], mean, rstd);
        if (several && a.partial) channels.pairs[k * block_threads() + group.index] = pair;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          sums[n] += weight[k] * pair[n];
          channel_sums[n] += pair[n];
        }
      }
    }
    let_next_kernel_start();
    if (a.dx) {
      group.sum(sums);
      if (group.index == 0) {
        a.row_sums[2 * block_id()] = sums[0];
        a.row_sums[2 * block_id() + 1] = sums[1];
      }
    }
    if (a.partial == nullptr) return;
    const int64_t sample = a.shape.sample(row), channel = first_channel + part_channel;
    if (several) {
      const int length = int(a.shape.channel / VEC), vectors = int((part.end - part.begin) / VEC);
      channels.total(1, 0, 0, vectors / length, length, 0, vectors,
                     [&](int, int nth, const float (&totals)[2]) { a.store_partial(sample, 1, 0, channel + nth, totals); });
    } else {
      group.sum(channel_sums);
      if (group.index == 0) a.store_partial(sample, a.parts.per_span, part.part - part_channel * a.parts.per_span, channel, channel_sums);
    }
  }
};

template <class T, int VEC> struct GroupNormBackwardApply {
  using Args = GroupNormBackwardArgs;
  static constexpr int K = launch::group_norm_part_k, max_threads = launch::group_norm_backward_apply.instance(VEC).max_threads,
                       min_blocks = launch::group_norm_part_blocks;
  static LIGER_DEVICE void run(const Args& a) {
    RowGroup group(block_threads());
    const RowPart part(a.parts, grid_blocks() - 1 - block_id(), a.shape.cols);
    const int64_t row = part.row, first_channel = a.shape.first_channel(row);
    const auto batch = [&](int64_t begin) { return Columns<VEC, K>(group.index, block_threads(), begin, part.end); };
    Packed<T, VEC> dy[K], x[K];
    const auto load_batch = [&](const Columns<VEC, K>& columns) {
      columns.template load<Hint::stream>(x, a.x, row * a.shape.cols);
      columns.template load<Hint::stream>(dy, a.dy, row * a.shape.cols);
    };
    load_batch(batch(part.begin));  // before the sums, which the previous kernel computes
    wait_for_previous_kernel();
    let_next_kernel_start();
    float sums[2] = {};
    for (int64_t nth = group.index; nth < a.parts.per_row; nth += block_threads())
#pragma unroll
      for (int n = 0; n < 2; ++n) sums[n] += a.row_sums[2 * (row * a.parts.per_row + nth) + n];
    group.sum(sums);
    const float mean = a.mean[row], rstd = a.rstd[row];
    for (int64_t begin = part.begin; begin < part.end;) {
      const Columns<VEC, K> columns = batch(begin);
      float weight[K];
      load_channels(weight, a.weight, 1, columns, [&](int64_t column) { return first_channel + quotient(column, a.shape.channel); });
      write_gradient(a, columns, dy, x, row, sums, mean, rstd, weight);
      begin += int64_t{block_threads()} * K * VEC;
      if (begin < part.end) load_batch(batch(begin));
    }
  }
};

}  // namespace liger::gpu
