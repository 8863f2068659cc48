// Cross entropy of rows of logits, its gradient, and the fused loss's in-place kernel.
//
// Per row i with target y, x' = softcap(x) = c * tanh(x / c) (or x), lse = log(sum(exp(x'))), p = exp(x' - lse),
// class weights w (ones if absent), smoothing e, z-loss factor s = lse_square_scale, t = p[y] with token scaling, else 1:
//   ce_i = t * ((1 - e) * w[y] * (lse - x'[y]) + e / V * sum_j w[j] * (lse - x'[j])),      z_i = t * s * lse^2
//   d ce_i / dx'[j] = t * ((1 - e) * w[y] * (p[j] - [j == y]) + e / V * (W * p[j] - w[j])),  W = sum_j w[j]
//   d z_i  / dx'[j] = t * 2 * s * lse * p[j];        dx[j] = dx'[j] * (1 - (x'[j] / c)^2);   t is a constant (detached).
// Log-probabilities of tokens add a temperature T of each row and a logit_scale s: x' = softcap(s * x) / T. The gradient below is then
// that of x' times (1 - tanh^2), without the factor s / T of its row. Further results of a row:
//   entropy = -sum(p * log(p)),  mean = sum(x') / V,  log_sum_sq = log(sum(p^2)).
// The gradient of entropy comes as numbers A, E, C of each row (`mix`): dx'[j] = p[j] * (A + E * log(p[j])) - C * [j == y].
// Ignored rows (target == ignore_index): losses and gradients 0, accuracy 0, prediction -1. A target outside [0, V) that is
// not ignore_index: throw_bad_target on the CPU; on a GPU NaN in the row's loss and gradient, and a record for the host.
//
// Accumulator type A is float, and double for double logits: every float-like array here is of A.
#pragma once
#include "kernels/types.h"

namespace liger {

enum class Reduction : int32_t { none, mean, sum };

struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0, lse_square_scale = 0;
  double softcap = 0;  // 0: none
  bool token_scaling = false;
  Reduction reduction = Reduction::mean;
  double logit_scale = 1;
};

// Sums over all rows that the loss needs; made on the device, so that nothing waits for a host: before the first row is read, or, if no
// row needs them, with the reduction.
//   counts[valid], counts[target_weight] = sum of w[y] over valid rows, counts[weight] = W,
//   counts[ce_scale], counts[z_scale]: what reduction (and normalizer) multiply the sums of ce_i and z_i by; 0 when nothing is valid;
//   counts[scale]: what the fused loss's unreduced gradients are multiplied by: ce_scale, or z_scale where class weights make that 0.
struct CrossEntropyCounts {
  enum Slot { valid, target_weight, weight, ce_scale, z_scale, scale, slots };
  int64_t rows, vocab;
  const int64_t* target;
  Vector class_weight;     // of A
  const void* normalizer;  // one A, or nullptr: replaces the mean's denominators (and the sum's 1)
  CrossEntropyOptions options;
  Dtype accumulator;       // f32 or f64
  void* counts;            // [slots] of A
};

// What a pass over rows of logits reads and writes per row; an output pointer may be nullptr: not wanted.
struct CrossEntropyRows {
  int64_t rows, vocab;
  int64_t first_row;      // of this chunk in the whole batch: for error messages; the arrays below are the chunk's already
  Rows logits;
  const int64_t* target;
  Vector class_weight;
  const void* counts;
  CrossEntropyOptions options;
  const char* op;         // name for error messages
  void *ce, *z, *accuracy;  // [rows] of A (accuracy: always float); ce and z are unreduced
  void* lse;              // [2, rows] of A: lse, and behind all of them what its rounding took from each
  int64_t* predicted;     // argmax, first on ties
  // CrossEntropyInChunks, statistics, merge, and for temperature the backward take these. entropy, mean, log_sum_sq: [rows] of A.
  const void* temperature;  // [rows] of A; nullptr: ones
  void *entropy, *mean, *log_sum_sq;

  bool moments() const { return entropy != nullptr || mean != nullptr || log_sum_sq != nullptr; }
  bool transforms() const { return temperature != nullptr || options.logit_scale != 1; }
  bool after_counts;      // nothing was put on the stream since cross_entropy_counts: a kernel may start beside it
};

// Which classes the columns of a matrix of logits are: column j is class first + j of `all`. Of a whole vocabulary: {0, columns}.
struct Classes {
  int64_t first, all;
};

// dlogits = grad_ce * counts[ce_scale] * dce + grad_ce * counts[z_scale] * dz, row by row; logits read once, dlogits written once.
struct CrossEntropyBackward {
  int64_t rows, vocab, first_row;  // vocab: columns
  Rows logits;
  const int64_t* target;
  Vector class_weight;    // of the columns' classes, inside those of all
  const void* counts;
  CrossEntropyOptions options;
  const char* op;
  const void* lse;        // as CrossEntropyRows::lse
  Rows grad;              // of the loss: one element (stride 0) or one per row (stride 1), any dtype; null: unreduced, see below
  MutableRows dlogits;    // may be the logits' own memory
  Classes classes;
  const void* token;      // [rows] of A, the probability of each target; read with token scaling
  const void* temperature;  // as CrossEntropyRows::temperature
  const void* mix;        // [rows, 4] of A: A, E, C and log(p[y]); nullptr: no gradient of entropy
  bool stored;            // logits are CrossEntropyInPlace's gradient of a row without softcap, which has p; there is a mix, and no lse
  double gradient_scale;  // without grad: CrossEntropyInPlace's gradient is written
};

// A vocabulary that is cut into chunks: ranges of classes that are processed one after another, or the shards of several devices. Each
// chunk has its statistics; merged, they give what a pass over whole rows gives; and each chunk's gradient is made by CrossEntropyBackward.
// A row's statistics in a chunk, with w of its classes:
//   maximum = max(x'), sum = sum(exp(x' - maximum)), target = x'[y], or 0 where y is not among its classes,
//   weighted = sum(w * (x' - anchor)) and weights = sum(w) with label smoothing, best = max(x) where predictions are wanted,
//   and if `moments` are wanted moment = sum(exp(x' - maximum) * (x' - maximum)), squares = sum(exp(2 * (x' - maximum))), total = sum(x').
struct CrossEntropyStatistics {
  enum Slot { maximum, sum, target, weighted, anchor, weights, best, slots, moment = slots, squares, total, all_slots };
  static constexpr int64_t slots_of(bool moments) { return moments ? all_slots : slots; }
  CrossEntropyRows row;   // vocab, logits, class_weight: the chunk's; no results, no counts
  Classes classes;
  void* statistics;       // [slots_of(moments), rows] of A
  int64_t* best_class;    // [rows]; nullptr: no predictions
  bool moments;
};
struct CrossEntropyMerge {
  CrossEntropyRows row;   // vocab, class_weight: of all classes; no logits; the results
  int64_t chunks;
  const void* statistics;      // [chunks, slots_of(row.moments()), rows] of A
  const int64_t* best_class;   // [chunks, rows], if accuracy or predictions are wanted
  Dtype accumulator;
  void* token;                 // [rows] of A, or nullptr: the probability of each target
};

// The fused loss's kernel: one pass gives the row's losses and overwrites its logits by the UNREDUCED gradient
//   (ce_scale * dce + z_scale * dz) / scale * gradient_scale,
// so that neither the mean's denominator nor the loss scale is in it: they multiply the results of the matmuls, and
// fp16 gradients neither underflow nor overflow.
struct CrossEntropyInPlace {
  CrossEntropyRows row;
  double gradient_scale;
  int64_t batch_rows;     // of all chunks: what row.counts are of

  MutableRows gradient() const { return {const_cast<void*>(row.logits.data), row.logits.stride, row.logits.dtype}; }
};

// The same of rows that lie in several matrices, each of some classes: from class `first`, a multiple of 64, in their order. The row may
// have temperatures and want moments, which CrossEntropyInPlace does not.
struct LogitsChunk {
  int64_t first;
  MutableRows logits;
};
struct CrossEntropyInChunks {
  CrossEntropyRows row;  // without logits; vocab: of the chunks
  int64_t classes;       // of the vocabulary, which may have others behind the chunks'
  const void* others;    // their CrossEntropyStatistics, [slots_of(row.moments()), rows] of A; nullptr: there are none
  double gradient_scale;
  int64_t batch_rows;
  const LogitsChunk* chunks;
  int count;
};

// Per-row losses to results: none: loss[i] = ce[i] + z[i]; else loss = ce_scale * sum(ce) + z_scale * sum(z), z_loss likewise;
// accuracy: sum / valid. Sums in a fixed order. `counting`: what the counts are made of, if that is yet to do; nullptr: they are there.
struct CrossEntropyReduce {
  int64_t rows;
  const void *ce, *z;
  const float* accuracy;
  const void* counts;
  Reduction reduction;
  Dtype accumulator;
  void *loss, *z_loss;      // [rows] or one, of A
  float* token_accuracy;    // one float: only for mean and sum (with none, per-row accuracy is the result)
  const CrossEntropyCounts* counting = nullptr;
};

namespace LIGER_BACKEND {
void cross_entropy_counts(const CrossEntropyCounts&, Stream);
void cross_entropy_forward(const CrossEntropyRows&, Stream);
void cross_entropy_backward(const CrossEntropyBackward&, Stream);
void cross_entropy_in_place(const CrossEntropyInPlace&, Stream);
// Does a kernel take such rows at once? Else statistics and merge are to be taken.
bool cross_entropy_takes_chunks(const CrossEntropyInChunks&, Stream);
void cross_entropy_in_chunks(const CrossEntropyInChunks&, Stream);
void cross_entropy_statistics(const CrossEntropyStatistics&, Stream);
void cross_entropy_merge(const CrossEntropyMerge&, Stream);
void cross_entropy_reduce(const CrossEntropyReduce&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
