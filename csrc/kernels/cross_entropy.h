// Cross entropy of rows of logits, its gradient, and the fused loss's kernels for rows of logits.
//
// Per row i with target y, x' = softcap(x) = c * tanh(x / c) (or x), lse = log(sum(exp(x'))), p = exp(x' - lse),
// class weights w (ones if absent), smoothing e, z-loss factor s = lse_square_scale, t = p[y] with token scaling, else 1:
//   ce_i = t * ((1 - e) * w[y] * (lse - x'[y]) + e / V * sum_j w[j] * (lse - x'[j])),      z_i = t * s * lse^2
//   d ce_i / dx'[j] = t * ((1 - e) * w[y] * (p[j] - [j == y]) + e / V * (W * p[j] - w[j])),  W = sum_j w[j]
//   d z_i  / dx'[j] = t * 2 * s * lse * p[j];        dx[j] = dx'[j] * (1 - (x'[j] / c)^2);   t is a constant (detached).
// linear_log_probs (log-probabilities of tokens) adds a temperature T per row and a logit_scale s: x' = softcap(s * x) / T. The gradient
// kernels store dx'[j] * (1 - tanh^2) for it, without the row's factor s / T. Further results of a row:
//   entropy = -sum(p * log(p)),  mean = sum(x') / V,  log_sum_sq = log(sum(p^2)).
// Three coefficients A, E, C of each row (`mix`) define a gradient that includes the entropy's:
//   dx'[j] = p[j] * (A + E * log(p[j])) - C * [j == y].
// Ignored rows (target == ignore_index): losses and gradients 0, accuracy 0, prediction -1. A target outside [0, V) that is not
// ignore_index: throw_bad_target on the CPU; on a GPU NaN in the row's loss and gradient, and a record for the host.
//
// In the comments below, "of A" means: of the accumulator type, which is float, and double for double logits. It is the type of all
// floating-point arrays except logits, gradients of logits, and arrays whose comment names another type.
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

// Sums over all rows that the loss needs. The device computes them, so that the host never waits: mostly before the first row is read. If
// no row's result depends on a sum, the reduction of the losses may compute them (CrossEntropyReduce::counting).
//   counts[valid]: the number of valid rows; counts[target_weight] = sum of w[y] over valid rows; counts[weight] = W;
//   counts[ce_scale], counts[z_scale]: factors of the sums of ce_i and z_i in the loss (from reduction, normalizer); 0 if no row is valid;
//   counts[scale]: the factor of the fused loss's unreduced gradients: ce_scale, or z_scale if class weights make ce_scale 0.
struct CrossEntropyCounts {
  enum Slot { valid, target_weight, weight, ce_scale, z_scale, scale, slots };
  int64_t rows, vocab;
  const int64_t* target;
  Vector class_weight;     // of A
  const void* normalizer;  // one A that replaces the mean's denominators (and the sum's 1), or nullptr
  CrossEntropyOptions options;
  Dtype accumulator;       // f32 or f64
  void* counts;            // [slots] of A
};

// The inputs and outputs of a pass over rows of logits. Outputs that nobody requested are null pointers.
struct CrossEntropyRows {
  int64_t rows, vocab;
  int64_t first_row;      // the number of this chunk's first row in the batch, for error messages; the arrays below are the chunk's
  Rows logits;
  const int64_t* target;
  Vector class_weight;
  const void* counts;
  CrossEntropyOptions options;
  const char* op;         // name for error messages
  void *ce, *z, *accuracy;  // [rows] of A (accuracy: always float); ce and z are unreduced
  void* lse;              // [2, rows] of A: every lse, and then the rounding error of every lse
  int64_t* predicted;     // argmax, first on ties
  // For CrossEntropyInChunks, statistics and merge; the backward uses only temperature. entropy, mean, log_sum_sq: [rows] of A.
  const void* temperature;  // [rows] of A; nullptr: ones
  void *entropy, *mean, *log_sum_sq;

  bool moments() const { return entropy != nullptr || mean != nullptr || log_sum_sq != nullptr; }
  bool transforms() const { return temperature != nullptr || options.logit_scale != 1; }
  bool after_counts;      // no kernel was queued after cross_entropy_counts: this one may start while that one runs
};

// The classes of a matrix of logits: column j is class first + j of `all` classes. For a whole vocabulary: {0, columns}.
struct Classes {
  int64_t first, all;
};

// dlogits = grad * (counts[ce_scale] * dce + counts[z_scale] * dz), row by row. Reads logits once and writes dlogits once.
struct CrossEntropyBackward {
  int64_t rows, vocab, first_row;  // vocab: columns
  Rows logits;
  const int64_t* target;
  Vector class_weight;    // of the columns' classes: points into the weights of all classes
  const void* counts;
  CrossEntropyOptions options;
  const char* op;
  const void* lse;        // as CrossEntropyRows::lse
  Rows grad;              // of the loss: one element (stride 0) or one per row (stride 1), any dtype; null: unreduced, see below
  MutableRows dlogits;    // may be the logits' own memory
  Classes classes;
  const void* token;      // [rows] of A, the probability of each target; read with token scaling
  const void* temperature;  // as CrossEntropyRows::temperature
  const void* mix;        // [rows, 4] of A: the coefficients A, E, C, and log(p[y]); nullptr: no gradient of entropy
  bool stored;            // with mix, without softcap: logits holds CrossEntropyInPlace's gradient, from which p follows; no lse
  double gradient_scale;  // without grad: the result is CrossEntropyInPlace's gradient, with this factor
};

// A vocabulary that is cut into chunks: ranges of classes that are processed one after another, or the shards of several devices. A first
// pass computes statistics of each chunk. Merged, they yield the results of a pass over whole rows. Then CrossEntropyBackward computes each
// chunk's gradient. A row's statistics in a chunk, with w of the chunk's classes:
//   maximum = max(x'), sum = sum(exp(x' - maximum)), target = x'[y], or 0 if y is not among the chunk's classes,
//   weighted = sum(w * (x' - anchor)) and weights = sum(w) with label smoothing, best = max(x) if predictions are requested,
//   and with `moments`: moment = sum(exp(x' - maximum) * (x' - maximum)), squares = sum(exp(2 * (x' - maximum))), total = sum(x').
struct CrossEntropyStatistics {
  enum Slot { maximum, sum, target, weighted, anchor, weights, best, slots, moment = slots, squares, total, all_slots };
  static constexpr int64_t slot_count(bool moments) { return moments ? all_slots : slots; }
  CrossEntropyRows row;   // vocab, logits, class_weight: the chunk's; no results, no counts
  Classes classes;
  void* statistics;       // [slot_count(moments), rows] of A
  int64_t* best_class;    // [rows]; nullptr: no predictions
  bool moments;
};
struct CrossEntropyMerge {
  CrossEntropyRows row;   // vocab, class_weight: of all classes; no logits; the results
  int64_t chunks;
  const void* statistics;      // [chunks, slot_count(row.moments()), rows] of A
  const int64_t* best_class;   // [chunks, rows], if accuracy or predictions are requested
  Dtype accumulator;
  void* token;                 // [rows] of A, or nullptr: the probability of each target
};

// The fused loss's kernel: one pass computes the row's losses and overwrites its logits with the UNREDUCED gradient
//   (ce_scale * dce + z_scale * dz) / scale * gradient_scale.
// It contains neither the mean's denominator nor the loss scale. These multiply the results of the matmuls, so that
// fp16 gradients neither underflow nor overflow.
struct CrossEntropyInPlace {
  CrossEntropyRows row;
  double gradient_scale;
  int64_t batch_rows;     // rows of all chunks: row.counts are sums over these

  MutableRows gradient() const { return {const_cast<void*>(row.logits.data), row.logits.stride, row.logits.dtype}; }
};

// CrossEntropyInChunks: as CrossEntropyInPlace, for rows that lie in several matrices. Each matrix has the logits of a range of classes;
// the matrices are in the order of the classes. `first`, a multiple of 64, is a matrix's first class. Unlike CrossEntropyInPlace, it
// supports temperatures and moments.
struct LogitsChunk {
  int64_t first;
  MutableRows logits;
};
struct CrossEntropyInChunks {
  CrossEntropyRows row;  // without logits; vocab: the classes of all chunks
  int64_t classes;       // of the vocabulary, which may have other classes behind the chunks'
  const void* others;  // CrossEntropyStatistics of the other classes, [slot_count(row.moments()), rows] of A; nullptr: no other classes
  double gradient_scale;
  int64_t batch_rows;
  const LogitsChunk* chunks;
  int count;
};

// The results of a loss from its per-row losses. Reduction none: loss[i] = ce[i] + z[i]. Otherwise loss = ce_scale * sum(ce) + z_scale *
// sum(z), and z_loss = z_scale * sum(z); token_accuracy = sum(accuracy) / valid. Sums have a fixed order. `counting`: the arguments from
// which this call also computes the counts; nullptr: the counts are already computed.
struct CrossEntropyReduce {
  int64_t rows;
  const void *ce, *z;
  const float* accuracy;
  const void* counts;
  Reduction reduction;
  Dtype accumulator;
  void *loss, *z_loss;  // [rows] or one, of A
  float* token_accuracy;  // one float: only for mean and sum (with none, per-row accuracy is the result)
  const CrossEntropyCounts* counting = nullptr;
};

namespace LIGER_BACKEND {
void cross_entropy_counts(const CrossEntropyCounts&, Stream);
void cross_entropy_forward(const CrossEntropyRows&, Stream);
void cross_entropy_backward(const CrossEntropyBackward&, Stream);
void cross_entropy_in_place(const CrossEntropyInPlace&, Stream);
// Returns whether cross_entropy_in_chunks supports this call. If not, the caller uses statistics, merge and backward.
bool cross_entropy_takes_chunks(const CrossEntropyInChunks&, Stream);
void cross_entropy_in_chunks(const CrossEntropyInChunks&, Stream);
void cross_entropy_statistics(const CrossEntropyStatistics&, Stream);
void cross_entropy_merge(const CrossEntropyMerge&, Stream);
void cross_entropy_reduce(const CrossEntropyReduce&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
