// Arguments of the kernels that overwrite rows of logits by their gradient: for losses (cross_entropy_in_place.cu), and for
// log-probabilities (cross_entropy_tokens.cu).
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
  float at_once_from;  // if at least this many targets of the batch are classes (not ignored), rows are loaded before their targets arrive

  template <class T> LIGER_DEVICE WholeRow<T> logits(int row) const { return {const_cast<void*>(rows.logits), rows.stride, row}; }
  LIGER_DEVICE int columns() const { return int(rows.vocab); }
};
struct HeldChunksArgs : HeldArgs {
  ChunkMatrices chunks;
  int columns_of_chunks;
  const float* others;  // statistics of the classes that no chunk contains; nullptr: the chunks contain all classes

  template <class T> LIGER_DEVICE RowInChunks<T> logits(int row) const { return {chunks, row}; }
  LIGER_DEVICE int columns() const { return columns_of_chunks; }
};

// Returns whether to load a row. A row whose target is ignored need not be loaded. But waiting for the target delays the row's loads, so
// threads wait only if many targets of the batch are ignored (docs/measurements.md).
LIGER_DEVICE bool is_wanted(const HeldArgs& args, int row) {
  const LogitRows& a = args.rows;
  return row < a.rows && (a.counts[CrossEntropyCounts::valid] >= args.at_once_from || a.is_class(a.target[row]));
}

// vocab: the number of all classes, including those that no chunk contains.
inline InPlaceArgs in_place_args(const CrossEntropyRows& row, int64_t vocab, double gradient_scale, const launch::Launch& made,
                                 Stream stream) {
  return {logit_rows(row, vocab, made.plan, stream), row_outputs(row), float(gradient_scale), made.plan.shared_offset};
}
inline float load_at_once_from(int64_t batch_rows) { return float(batch_rows) * 15 / 16; }

// Arguments for rows in several matrices. config: the launch of InPlaceHeld or of InPlaceTokens.
inline HeldChunksArgs held_chunks_args(const CrossEntropyInChunks& op, const launch::Launch& made, Stream stream) {
  const CrossEntropyRows& row = op.row;
  HeldChunksArgs args{{in_place_args(row, op.classes, op.gradient_scale, made, stream), load_at_once_from(op.batch_rows)},
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

// Launches InPlaceTokens (cross_entropy_tokens.cu).
void log_probs_in_place(const CrossEntropyInChunks& op, const launch::Launch& made, Stream stream);

}  // namespace liger::gpu
