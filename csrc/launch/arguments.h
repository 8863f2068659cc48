// The launches of the kernels of cross entropy and of the fused loss, from the kernels' arguments (csrc/kernels). csrc/gpu executes them.
// csrc/trace, which runs the ops of the fused loss on tensors without data, lists them. launch.h explains the argument `knobs`.
#pragma once
#include "kernels/aligned.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "launch/cross_entropy.h"
#include "launch/elementwise.h"

namespace liger::launch {

inline bool costly_options(const CrossEntropyOptions& o) { return o.softcap != 0 || o.label_smoothing != 0; }
inline bool is_log_probs(const CrossEntropyOptions& o) { return !costly_options(o) && !o.token_scaling && o.lse_square_scale == 0; }
// Returns whether a call needs the full kernel instance, for options that cost registers.
inline bool is_full(const CrossEntropyRows& op) { return costly_options(op.options) || op.accuracy || op.predicted; }
// Returns whether a call needs the instance for log-probabilities, which is also a full one.
inline bool needs_log_probs(const CrossEntropyBackward& op) { return op.mix || op.temperature || op.options.logit_scale != 1; }
inline bool needs_log_probs(const CrossEntropyStatistics& op) { return op.moments || op.row.transforms(); }
inline bool is_full(const CrossEntropyBackward& op) { return costly_options(op.options) || needs_log_probs(op); }
inline bool is_full(const CrossEntropyStatistics& op) { return costly_options(op.row.options) || op.best_class || needs_log_probs(op); }
inline bool is_plain(const CrossEntropyRows& row) { return !is_full(row) && !row.options.token_scaling; }
inline bool needs_log_probs(const CrossEntropyRows& row) { return row.moments() || row.transforms(); }

// vectors: true if accesses may have 16 bytes.
template <class Op> LogitsShape logits_shape(const Op& op, bool vectors, bool full) {
  const int bytes = int(dtype_bytes(op.logits.dtype));
  return {op.rows, op.vocab, bytes, vectors ? 16 / bytes : 1, full};
}

inline Launch op_launch(const DeviceProfile& device, const CrossEntropyRows& op, const Knobs* knobs = nullptr) {
  return cross_entropy_forward(device, logits_shape(op, true, is_full(op)), op.after_counts, knobs);
}
inline Launch op_launch(const DeviceProfile& device, const CrossEntropyBackward& op, const Knobs* knobs = nullptr) {
  const bool vectors = equally_aligned(op.logits, {op.dlogits.data, op.dlogits.stride, op.dlogits.dtype});
  return cross_entropy_backward(device, logits_shape(op, vectors, is_full(op)), knobs);
}
// 16-byte accesses need only aligned row starts, whatever the number of columns.
inline Launch op_launch(const DeviceProfile& device, const CrossEntropyInPlace& op, const Knobs* knobs = nullptr) {
  const bool vectors = aligned(op.row.logits, 0) && aligned(op.row.class_weight, 0);
  return cross_entropy_in_place(device, logits_shape(op.row, vectors, is_full(op.row)), is_plain(op.row), knobs);
}
// One launch, or none if the kernels cannot hold the rows.
inline Launches op_launches(const DeviceProfile& device, const CrossEntropyInChunks& op, const Knobs* knobs = nullptr) {
  const CrossEntropyRows& row = op.row;
  const bool log_probs = needs_log_probs(row), predicts = row.accuracy || row.predicted;
  // InPlaceLogProbs has no options of a loss. Its predictions are among the chunks' classes, so it cannot predict if there are others.
  const bool taken = log_probs ? is_log_probs(row.options) && !row.class_weight.data && !(predicts && op.others) : is_plain(row);
  if (!taken) return {};
  bool vectors = true;
  for (int i = 0; i < op.count; ++i) vectors &= aligned(op.chunks[i].logits, 0);
  const auto launch = cross_entropy_in_chunks(device, logits_shape(row, vectors, log_probs), log_probs, op.count, knobs);
  return launch ? Launches{*launch} : Launches();
}
inline Launch op_launch(const DeviceProfile& device, const CrossEntropyStatistics& op) {
  return cross_entropy_statistics(device, logits_shape(op.row, true, is_full(op)));
}
inline Launch op_launch(const DeviceProfile& device, const CrossEntropyMerge& op) { return cross_entropy_merge(device, op.row.rows); }
inline Launch op_launch(const DeviceProfile& device, const CrossEntropyCounts& op) { return count_targets(device, op.rows, op.vocab); }
inline Launch op_launch(const DeviceProfile& device, const CrossEntropyReduce& op) {
  return op.reduction == Reduction::none ? add_losses(device, op.rows) : sum_losses(device, op.rows);
}
inline Launch op_launch(const DeviceProfile& device, const ScaleCast& op) {
  const bool wide = aligned(op.in, 0) && aligned(op.out, 0);
  const bool contiguous = op.in.stride == op.cols && op.out.stride == op.cols && op.row_scale.data == nullptr;
  return row_tiles(device, scale_kernel, tiled_matrix(op.rows, op.cols, wide ? matrix_vec : 1, contiguous));
}
inline Launch op_launch(const DeviceProfile& device, const FillRows& op) {
  const bool wide = aligned(op.matrix, 0) && aligned(op.values, 0);
  return row_tiles(device, fill_kernel, tiled_matrix(op.rows, op.cols, wide ? matrix_vec : 1));
}
inline Launches op_launches(const DeviceProfile& device, const ColumnSum& op) {
  if (op.cols == 0) return {};
  const Launch partial = partial_columns(device, op.rows, op.cols, aligned(op.in, 0) ? matrix_vec : 1);
  return {partial, sum_columns(device, partial.plan.partial_rows, op.cols, 0)};
}
inline int64_t workspace_bytes(const DeviceProfile& device, const ColumnSum& op) {
  const Launches launches = op_launches(device, op);
  return launches.size() == 0 ? 0 : launches.begin()->plan.partial_rows * round_up(op.cols, matrix_vec) * int64_t{sizeof(float)};
}
inline Launch op_launch(const DeviceProfile& device, const ScalarProduct& op) { return product(device, op.factors.data ? op.rows : 1); }

}  // namespace liger::launch
