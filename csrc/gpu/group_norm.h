// Shared by the kernels of GroupNorm: the bounds of a long row's parts, loads of the parameters of a row's channels, and sums over
// channels.
#pragma once
#include "gpu/device.h"
#include "gpu/rows.h"
#include "launch/group_norm.h"

namespace liger::gpu {

// The shape of a row (a group of one sample): its length, the length of a channel, and the numbers of its channels.
struct GroupNormRow {
  int64_t cols, channel, channels, groups;
  Divisor by_channel;  // divides a column by `channel`; for rows that registers hold
  float inverse_cols;

  explicit GroupNormRow(const GroupNormShape& shape)
      : cols(shape.cols()),
        channel(shape.channel),
        channels(shape.channels),
        groups(shape.groups),
        by_channel(shape.channel < INT32_MAX ? shape.channel : INT32_MAX),
        inverse_cols(1 / float(shape.cols())) {}
  LIGER_DEVICE int64_t sample(int64_t row) const { return quotient(row, groups); }
  // The number of the row's first channel in its sample.
  LIGER_DEVICE int64_t first_channel(int64_t row) const { return (row - sample(row) * groups) * channels; }
};

// The part of a row that a block processes.
struct RowPart {
  int64_t row, part, begin, end;
  // `block`: a block's number, not necessarily this block's.
  LIGER_DEVICE RowPart(const launch::RowParts& parts, int64_t block, int64_t cols) : row(quotient(block, parts.per_row)) {
    part = block - row * parts.per_row;
    begin = part_begin(parts, part);
    end = part_end(parts, part, cols);
  }
  LIGER_DEVICE static int64_t part_begin(const launch::RowParts& parts, int64_t part) {
    const int64_t span = quotient(part, parts.per_span);
    return span * parts.span + (part - span * parts.per_span) * parts.part;
  }
  LIGER_DEVICE static int64_t part_end(const launch::RowParts& parts, int64_t part, int64_t cols) {
    const int64_t span_end = (quotient(part, parts.per_span) + 1) * parts.span, end = part_begin(parts, part) + parts.part;
    const int64_t within = end < span_end ? end : span_end;
    return within < cols ? within : cols;
  }
};

// Loads a parameter of any dtype for K vectors: for each, the value of the channel in which the vector begins, channel_at(column). There is
// one branch on the dtype, then all loads, so that no load waits for another. If the parameter is absent, the values are `missing`.
template <int VEC, int K, class F>
LIGER_DEVICE void load_channels(float (&out)[K], const Vector& parameter, float missing, const Columns<VEC, K>& columns, F channel_at) {
#pragma unroll
  for (int k = 0; k < K; ++k) out[k] = missing;
  if (parameter.data == nullptr) return;
  with_dtype(parameter.dtype, [&](auto tag) {
    using W = std::remove_cvref_t<decltype(tag)>;
    W raw[K] = {};
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k)) raw[k] = static_cast<const W*>(parameter.data)[channel_at(columns.first + k * columns.step)];
#pragma unroll
    for (int k = 0; k < K; ++k) out[k] = to_float(raw[k]);
  });
}

// The parameters of the channels of a block's rows, as floats in shared memory. The block loads them together with its rows, so that it
// does not wait for them after the reductions. A barrier of the block must follow before they are read.
template <int Parameters> struct ChannelTable {
  Shared<float> values;  // [Parameters][count]
  int count;             // channels of all rows of the block

  // channel_at(i): the number of the ith channel in its sample, or -1 where there is none. offset: in shared memory, in bytes. missing: the
  // values of absent parameters.
  template <class F>
  LIGER_DEVICE ChannelTable(int count, int offset, const Vector (&parameters)[Parameters], const float (&missing)[Parameters], F channel_at)
      : values(shared<float>(offset)), count(count) {
#pragma unroll
    for (int n = 0; n < Parameters; ++n) {
      const int skipped = n * warp_width();  // other warps load the next parameter, so that no thread waits twice
#pragma unroll 1
      for (int i = thread_id() - skipped + (thread_id() < skipped ? block_threads() : 0); i < count; i += block_threads()) {
        const int64_t channel = channel_at(i);
        const bool present = parameters[n].data != nullptr && channel >= 0;
        values[n * count + i] = present ? load_one(parameters[n].data, parameters[n].dtype, channel) : missing[n];
      }
    }
  }
  LIGER_DEVICE float operator()(int parameter, int i) const { return values[parameter * count + i]; }
};
// Returns ChannelTable's channel_at() for a block of several rows, of which the first is `first_row`.
LIGER_DEVICE auto block_channels(const GroupNormRow& shape, int64_t first_row, int64_t rows) {
  return [&shape, first_row, rows](int i) -> int64_t {
    const int line = i / int(shape.channels);
    const int64_t row = first_row + line;
    return row < rows ? shape.first_channel(row) + (i - line * int(shape.channels)) : -1;
  };
}

// The sums of dy * n and of dy of each channel. Shared memory holds a pair of sums for each vector of the block, from `offset` on; total()
// adds up the pairs of each channel.
struct ChannelSums {
  Shared<Vec<float, 2>> pairs;

  LIGER_DEVICE explicit ChannelSums(int offset) : pairs(shared<Vec<float, 2>>(offset)) {}

  // Adds up the pairs of `lines` rows with `channels` channels each, from channel first_channel of the row on. Row `line` has its pairs
  // from line * pitch on, one for each of the row's vectors [begin, end); other blocks have the other vectors. Channel nth has `length`
  // vectors, from vector nth * length of the row on. One thread per channel calls store(line, nth, sums). All threads of the block must
  // call total() together.
  template <class F>
  LIGER_DEVICE void total(int lines, int pitch, int first_channel, int channels, int length, int begin, int end, F store) const {
    const int lanes = length >= warp_width() ? warp_width() : length <= 1 ? 1 : 2 << highest_bit(length - 1);  // lanes that share a channel
    const int lane_groups = block_threads() >> highest_bit(lanes), lane_group = thread_id() >> highest_bit(lanes),
              lane = thread_id() & (lanes - 1);
    block_barrier();
    for (int at = 0; at < lines * channels; at += lane_groups) {  // all threads execute the same number of iterations
      const int all = at + lane_group, line = lines == 1 ? 0 : all / channels, nth = first_channel + all - line * channels;
      const bool live = all < lines * channels;
      float sums[2] = {};
      const int first = nth * length, last = first + length;
      for (int v = (first > begin ? first : begin) + lane; live && v < (last < end ? last : end); v += lanes) {
        const Vec<float, 2> pair = pairs[line * pitch + v - begin];
        sums[0] += pair[0];
        sums[1] += pair[1];
      }
      for (int mask = lanes / 2; mask > 0; mask /= 2) {
        sums[0] += shfl_xor(sums[0], mask);
        sums[1] += shfl_xor(sums[1], mask);
      }
      if (live && lane == 0) store(line, nth, sums);
    }
  }
};

}  // namespace liger::gpu
