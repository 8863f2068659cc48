// Arguments of the ops on a shard of the vocabulary.
#pragma once
#include "checks/cross_entropy.h"
#include "checks/head.h"

namespace liger::LIGER_BACKEND {

constexpr const char* of_a_shard = "fused_linear_cross_entropy";  // the function that calls them

inline HeadDtypes check_shard(const char* op, const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                              const OptionalTensor& ce_weight, const std::optional<ScalarType>& accum_dtype,
                              const std::optional<ScalarType>& compute_dtype, int64_t first_class, int64_t vocab_size) {
  const HeadDtypes dtypes = check_head(op, x, weight, bias, accum_dtype, compute_dtype);
  require(first_class >= 0 && vocab_size >= 1 && first_class <= vocab_size && weight.size(0) <= Size(vocab_size - first_class), op,
          ": first_class is ", first_class, " and vocab_size ", vocab_size, ", which do not hold the ", weight.size(0),
          " classes of weight");
  check_targets(op, target, ce_weight, "ce_weight", x.size(0), vocab_size, dtypes.acc, x, "x");
  return dtypes;
}

inline void check_vocabulary_shard_statistics(const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                                              const OptionalTensor& ce_weight, int64_t ignore_index, double label_smoothing,
                                              const std::optional<double>& softcap, const std::optional<ScalarType>& accum_dtype,
                                              const std::optional<ScalarType>& compute_dtype, int64_t first_class, int64_t vocab_size,
                                              int64_t chunk_rows, bool predictions, bool keep_logits) {
  const char* op = of_a_shard;
  check_loss_options(op, 0, label_smoothing, softcap);
  check_shard(op, x, weight, target, bias, ce_weight, accum_dtype, compute_dtype, first_class, vocab_size);
  require(chunk_rows >= 1 && (!keep_logits || Size(chunk_rows) >= x.size(0)), op, ": chunk_rows is ", chunk_rows, " and keep_logits ",
          keep_logits, ", expected at least 1, and all ", x.size(0), " rows where they are kept");
}

// Logits of all rows, or their gradient; or nothing.
inline bool check_shard_logits(const char* op, const Tensor& t, const char* name, const Tensor& x, const Tensor& weight, Dtype compute) {
  check_device(op, t, name, x, "x");
  if (t.numel() == Size(0)) return false;
  check_shape(op, t, name, {x.size(0), weight.size(0)});
  require(type_of(t) == scalar_type(compute) && t.stride(1) == 1 && t.stride(0) >= weight.size(0), op, ": ", name,
          " is not what the forward returned");
  return true;
}

inline void check_vocabulary_shard_losses(const Tensor& logits, const Tensor& statistics, const Tensor& best_class, const Tensor& x,
                                          const Tensor& weight, const Tensor& target, const OptionalTensor& ce_weight,
                                          const OptionalTensor& normalizer, int64_t ignore_index, int64_t reduction, double label_smoothing,
                                          double lse_square_scale, const std::optional<double>& softcap, bool use_token_scaling,
                                          bool return_z_loss, bool return_token_accuracy, bool return_predicted_tokens,
                                          const std::optional<ScalarType>& compute_dtype, int64_t first_class, int64_t vocab_size) {
  const char* op = of_a_shard;
  check_loss_options(op, reduction, label_smoothing, softcap);
  const HeadDtypes dtypes = check_shard(op, x, weight, target, {}, ce_weight, {}, compute_dtype, first_class, vocab_size);
  check_shard_logits(op, logits, "logits", x, weight, dtypes.compute);
  check_defined(op, statistics, "statistics");
  require(statistics.dim() == 3 && statistics.size(0) >= 1, op, ": statistics has shape ", shape_text(statistics),
          ", expected (shards, slots, rows)");
  const Size shards = statistics.size(0), rows = x.size(0);
  check_made(op, statistics, "statistics", {shards, CrossEntropyStatistics::slots, rows}, dtypes.acc, x, "x");
  const bool predictions = return_token_accuracy || return_predicted_tokens;
  check_device(op, best_class, "best_class", x, "x");
  check_shape(op, best_class, "best_class", {predictions ? shards : Size(0), rows});
  require(type_of(best_class) == ScalarType::Long && best_class.is_contiguous(), op, ": best_class is not what the forward returned");
  if (normalizer) check_made(op, *normalizer, "normalizer", {1}, dtypes.acc, x, "x");
}

inline void check_vocabulary_shard_backward(const Tensor& dloss, const Tensor& x, const Tensor& weight, const Tensor& target,
                                            const OptionalTensor& bias, const OptionalTensor& ce_weight, const Tensor& counts,
                                            const Tensor& kept, const Tensor& saved, int64_t ignore_index, int64_t reduction,
                                            double label_smoothing, double lse_square_scale, const std::optional<double>& softcap,
                                            bool use_token_scaling, const std::optional<ScalarType>& accum_dtype,
                                            const std::optional<ScalarType>& compute_dtype, int64_t first_class, int64_t vocab_size,
                                            int64_t chunk_rows, bool need_dx, bool need_dweight, bool need_dbias) {
  const char* op = of_a_shard;
  check_loss_options(op, reduction, label_smoothing, softcap);
  const HeadDtypes dtypes = check_shard(op, x, weight, target, bias, ce_weight, accum_dtype, compute_dtype, first_class, vocab_size);
  const Size rows = x.size(0);
  check_loss_gradient(op, dloss, reduction, rows, x, "x");
  check_made(op, counts, "counts", {CrossEntropyCounts::slots}, dtypes.acc, x, "x");
  check_made(op, kept, "kept", {launch::kept_for_gradients(rows, use_token_scaling)}, dtypes.acc, x, "x");
  check_shard_logits(op, saved, "saved", x, weight, dtypes.compute);
  require(chunk_rows >= 1, op, ": chunk_rows is ", chunk_rows, ", expected at least 1");
}

}  // namespace liger::LIGER_BACKEND
