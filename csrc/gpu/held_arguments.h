// Arguments of the kernels that overwrite rows of logits by their gradient: for losses (cross_entropy_in_place.cu), and for
// log-probabilities (cross_entropy_log_probs.cu).
#pragma once
#include "gpu/cross_entropy_launch.h"
#include "gpu/held_statistics.h"

namespace liger::gpu {

struct InPlaceArgs {
  LogitRows rows;
  RowOutputs out;
  float gradient_scale;
  int shared_offset;  // byte offset, in shared memory, of the vectors that threads keep there
};
struct HeldArgs : InPlaceArgs {
  float min_valid_to_load_early;  // if at least this many targets of the batch are not ignored, rows are loaded before their targets arrive

  template <class T> LIGER_DEVICE WholeRow<T> logits(int row) const { return {const_cast<void*>(rows.logits), rows.stride, row}; }
  LIGER_DEVICE int columns() const { return int(rows.vocab); }
};
struct HeldChunksArgs : HeldArgs {
  ChunkMatrices chunks;
  int chunk_columns;
  const float* others;  // statistics of the classes that no chunk contains; nullptr: the chunks contain all classes

  template <class T> LIGER_DEVICE RowInChunks<T> logits(int row) const { return {chunks, row}; }
  LIGER_DEVICE int columns() const { return chunk_columns; }
};

// Returns whether to load a row. A row whose target is ignored need not be loaded. But waiting for the target delays the row's loads, so
// threads wait only if many targets of the batch are ignored (docs/measurements.md).
LIGER_DEVICE bool should_load(const HeldArgs& args, int row) {
  const LogitRows& a = args.rows;
  return row < a.rows && (a.counts[CrossEntropyCounts::valid] >= args.min_valid_to_load_early || a.is_class(a.target[row]));
}

// vocab: the number of all classes, including those that no chunk contains.
inline InPlaceArgs in_place_args(const CrossEntropyRows& row, int64_t vocab, double gradient_scale, const launch::Launch& config,
                                 Stream stream) {
  return {logit_rows(row, vocab, config.plan, stream), row_outputs(row), float(gradient_scale), config.plan.shared_offset};
}
inline float min_valid_targets(int64_t batch_rows) { return float(batch_rows) * 15 / 16; }

// Arguments for rows in several matrices. config: the launch of InPlaceHeld or of InPlaceLogProbs.
inline HeldChunksArgs held_chunks_args(const CrossEntropyInChunks& op, const launch::Launch& config, Stream stream) {
  const CrossEntropyRows& row = op.row;
  HeldChunksArgs args{{in_place_args(row, op.classes, op.gradient_scale, config, stream), min_valid_targets(op.batch_rows)},
                      {},
                      int(row.vocab),
                      static_cast<const float*>(op.others)};
  args.rows.vocab = op.classes;
  for (int i = 0; i < op.count; ++i) {
    const MutableRows& logits = op.chunks[i].logits;
    args.chunks.end[i] = i + 1 < op.count ? int(op.chunks[i + 1].first) : INT_MAX;
    args.chunks.begin[i] = static_cast<char*>(logits.data) - op.chunks[i].first * dtype_bytes(logits.dtype);
    args.chunks.stride[i] = logits.stride;
  }
  return args;
}

// Launches InPlaceLogProbs (cross_entropy_log_probs.cu).
void log_probs_in_place(const CrossEntropyInChunks& op, const launch::Launch& config, Stream stream);

}  // namespace liger::gpu
