// Checks of the arguments of the ops on a shard of the vocabulary (ops/sharded_vocabulary.cpp).
#pragma once
#include "checks/fused_linear_cross_entropy.h"

namespace liger::LIGER_BACKEND {

constexpr const char* shard_op = "fused_linear_cross_entropy";  // the function that calls them

// weight, bias: the shard's. statistics, best_class: of all shards. logits, saved: the shard's, of all rows, or empty.
struct VocabularyShard : FusedLoss {
  int64_t first_class = 0, vocab_size = 1;
  bool predictions = false, keep_logits = false;
  Tensor logits, statistics, best_class, gradient_state;

  using F = VocabularyShard;
  static constexpr auto members =
      std::tuple_cat(FusedLoss::members, std::tuple{Member{"first_class", &F::first_class}, Member{"vocab_size", &F::vocab_size},
                                                    Member{"predictions", &F::predictions}, Member{"keep_logits", &F::keep_logits},
                                                    Member{"logits", &F::logits}, Member{"statistics", &F::statistics},
                                                    Member{"best_class", &F::best_class}, Member{"gradient_state", &F::gradient_state}});
};

inline HeadDtypes check_shard(const char* op, const VocabularyShard& a) {
  check_loss_options(op, a);
  const HeadDtypes dtypes = check_head(op, a.x, a.weight, a.bias, a.accum_dtype, a.compute_dtype, a.logits_dtype);
  require(
      a.first_class >= 0 && a.vocab_size >= 1 && a.first_class <= a.vocab_size && a.weight.size(0) <= Size(a.vocab_size - a.first_class),
      op, ": first_class is ", a.first_class, " and vocab_size ", a.vocab_size, ", which do not hold the ", a.weight.size(0),
      " classes of weight");
  check_targets(op, a.target, a.ce_weight, "ce_weight", a.x.size(0), a.vocab_size, dtypes.acc, a.x, "x");
  check_log_probs(op, a, dtypes.acc);
  return dtypes;
}

inline void check_vocabulary_shard_statistics(const VocabularyShard& a) {
  const char* op = shard_op;
  const HeadDtypes dtypes = check_shard(op, a);
  require(!a.keep_logits || !dtypes.wide_logits(), op,
          ": keep_logits is true, expected false, since the dtype of logits is not that of the matmuls");
  require(a.chunk_rows >= Size(1) && (!a.keep_logits || a.chunk_rows >= a.x.size(0)), op, ": chunk_rows is ", a.chunk_rows,
          " and keep_logits ", a.keep_logits, ", expected at least 1, and all ", a.x.size(0), " rows where they are kept");
}

// Checks the logits of all rows, or their gradient. Returns false if the tensor is empty.
inline bool check_shard_logits(const char* op, const Tensor& t, const char* name, const Tensor& x, const Tensor& weight, Dtype compute) {
  check_device(op, t, name, x, "x");
  if (t.numel() == Size(0)) return false;
  check_shape(op, t, name, {x.size(0), weight.size(0)});
  require(tensor_type(t) == scalar_type(compute) && t.stride(1) == 1 && t.stride(0) >= weight.size(0), op, ": ", name,
          " is not what the forward returned");
  return true;
}

inline void check_vocabulary_shard_losses(const VocabularyShard& a) {
  const char* op = shard_op;
  const HeadDtypes dtypes = check_shard(op, a);
  check_shard_logits(op, a.logits, "logits", a.x, a.weight, dtypes.compute);
  check_defined(op, a.statistics, "statistics");
  require(a.statistics.dim() == 3 && a.statistics.size(0) >= 1, op, ": statistics has shape ", shape_text(a.statistics),
          ", expected (shards, slots, rows)");
  const Size shards = a.statistics.size(0), rows = a.x.size(0);
  const int64_t slots = CrossEntropyStatistics::slot_count(a.wants_moments());
  check_forward_result(op, a.statistics, "statistics", {shards, slots, rows}, dtypes.acc, a.x, "x");
  const bool predictions = a.return_token_accuracy || a.return_predicted_tokens;
  check_device(op, a.best_class, "best_class", a.x, "x");
  check_shape(op, a.best_class, "best_class", {predictions ? shards : Size(0), rows});
  require(tensor_type(a.best_class) == ScalarType::Long && a.best_class.is_contiguous(), op,
          ": best_class is not what the forward returned");
  if (a.normalizer) check_forward_result(op, *a.normalizer, "normalizer", {1}, dtypes.acc, a.x, "x");
}

// Checks the arguments of both backwards. Returns whether there is a stored gradient of the logits.
inline bool check_shard_gradients(const VocabularyShard& a) {
  const char* op = shard_op;
  const HeadDtypes dtypes = check_shard(op, a);
  const Size rows = a.x.size(0);
  check_loss_gradient(op, a.dloss, a.reduction, rows, a.x, "x");
  check_forward_result(op, a.counts, "counts", {CrossEntropyCounts::slots}, dtypes.acc, a.x, "x");
  check_forward_result(op, a.gradient_state, "gradient_state", {launch::gradient_state_size(rows, a.use_token_scaling)}, dtypes.acc, a.x,
                       "x");
  require(a.chunk_rows >= Size(1), op, ": chunk_rows is ", a.chunk_rows, ", expected at least 1");
  return check_shard_logits(op, a.saved, "saved", a.x, a.weight, dtypes.compute);
}

inline void check_vocabulary_shard_backward(const VocabularyShard& a) {
  const bool saved = check_shard_gradients(a);
  require(!a.mix || !saved, shard_op, ": saved has ", a.saved.numel(),
          " elements, expected none, since there is a gradient of the entropy (mix)");
}

// The op overwrites saved.
inline void check_vocabulary_shard_backward_in_place(const VocabularyShard& a) {
  const bool saved = check_shard_gradients(a);
  require(a.mix && !a.softcap && (saved || a.x.size(0) == Size(0)), shard_op,
          ": expected mix, saved and no softcap: the op computes"
          " no other gradient in place");
}

}  // namespace liger::LIGER_BACKEND
