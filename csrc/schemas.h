// The schemas of the ops that take their arguments as a struct (checks/named.h), which schemas.cpp registers. Each text also selects, at
// compile time, the struct's members; so a schema stands here only.
#pragma once

namespace liger::schemas {

// lse: [2, rows], the logarithms of the sums of exponentials, and their rounding errors.
inline constexpr char cross_entropy[] =
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, int reduction, float label_smoothing,"
    " float lse_square_scale, float? softcap, bool return_z_loss, bool return_token_accuracy, bool return_predicted_tokens)"
    " -> (Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor lse, Tensor counts)";
inline constexpr char cross_entropy_backward[] =
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor lse, Tensor counts,"
    " int ignore_index, int reduction, float label_smoothing, float lse_square_scale, float? softcap) -> Tensor";

// chunk_rows, chunk_classes: the number of rows and classes of logits that exist at a time. gradients: the strategy for the gradients
// (ops/fused_linear.h). 0: none. 1, deferred: `saved` holds the unreduced gradient of all logits, and the backward runs the matmuls.
// 2, accumulated: dx, dbias, and dweight's memory with `saved` behind it hold sums of unreduced gradients. 3: recomputed. 4, overlaid:
// dweight's memory and `saved` hold the unreduced gradient of the logits of the first chunk_classes classes. For 2 and 4, the backward_
// computes dweight in place.
inline constexpr char fused_linear_cross_entropy[] =
    "fused_linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, Tensor? normalizer,"
    " Tensor? temperature, int ignore_index, int reduction, float label_smoothing, float lse_square_scale, float? softcap,"
    " float logit_scale, bool use_token_scaling, bool return_z_loss, bool return_token_accuracy, bool return_predicted_tokens,"
    " bool return_entropy, bool return_mean_logits, bool return_log_sum_sq, ScalarType? accum_dtype, ScalarType? compute_dtype,"
    " ScalarType? logits_dtype, int gradients, SymInt chunk_rows, SymInt chunk_classes, bool need_dx,"
    " bool need_dweight, bool need_dbias)"
    " -> (Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor entropy,"
    " Tensor mean_logits, Tensor log_sum_sq, Tensor counts, Tensor saved, Tensor dx, Tensor dweight, Tensor dbias)";
inline constexpr char fused_linear_cross_entropy_backward[] =
    "fused_linear_cross_entropy_backward(Tensor dloss, Tensor x, Tensor weight, Tensor target, Tensor? bias,"
    " Tensor? ce_weight, Tensor? temperature, Tensor? mix, Tensor counts, Tensor saved, Tensor dx, Tensor dweight, Tensor dbias,"
    " int ignore_index, int reduction, float label_smoothing, float lse_square_scale, float? softcap, float logit_scale,"
    " bool use_token_scaling, bool return_entropy, ScalarType? accum_dtype,"
    " ScalarType? compute_dtype, ScalarType? logits_dtype, int gradients, SymInt chunk_rows, SymInt chunk_classes, bool need_dx,"
    " bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)";
inline constexpr char fused_linear_cross_entropy_backward_[] =
    "fused_linear_cross_entropy_backward_(Tensor(a!) dweight, Tensor(b!) saved, Tensor dloss, Tensor x, Tensor weight, Tensor target,"
    " Tensor? bias, Tensor? ce_weight, Tensor? temperature, Tensor? mix, Tensor counts, Tensor dx, Tensor dbias,"
    " int ignore_index, int reduction, float label_smoothing, float lse_square_scale, float? softcap, float logit_scale,"
    " bool use_token_scaling, bool return_entropy, ScalarType? accum_dtype,"
    " ScalarType? compute_dtype, ScalarType? logits_dtype, int gradients, SymInt chunk_rows, SymInt chunk_classes, bool need_dx,"
    " bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dbias)";

// The work of one process for its shard of the vocabulary, between the collectives (ops/sharded_vocabulary.cpp). statistics: [1, slots,
// rows] of one shard, gathered to [shards, slots, rows]. logits: the shard's logits of all rows, or empty; losses_ overwrites them with
// their unreduced gradient, the backward's `saved`. backward_ overwrites `saved` with the gradient that mix defines.
inline constexpr char vocabulary_shard_statistics[] =
    "vocabulary_shard_statistics(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight,"
    " Tensor? temperature, int ignore_index, float label_smoothing, float? softcap, float logit_scale, bool return_entropy,"
    " bool return_mean_logits, bool return_log_sum_sq, ScalarType? accum_dtype, ScalarType? compute_dtype,"
    " ScalarType? logits_dtype, int first_class, int vocab_size, int chunk_rows, bool predictions, bool keep_logits)"
    " -> (Tensor logits, Tensor statistics, Tensor best_class)";
inline constexpr char vocabulary_shard_losses_[] =
    "vocabulary_shard_losses_(Tensor(a!) logits, Tensor statistics, Tensor best_class, Tensor x, Tensor weight, Tensor target,"
    " Tensor? ce_weight, Tensor? normalizer, Tensor? temperature, int ignore_index, int reduction, float label_smoothing,"
    " float lse_square_scale, float? softcap, float logit_scale, bool use_token_scaling, bool return_z_loss,"
    " bool return_token_accuracy, bool return_predicted_tokens, bool return_entropy, bool return_mean_logits,"
    " bool return_log_sum_sq, ScalarType? compute_dtype, int first_class, int vocab_size)"
    " -> (Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor entropy, Tensor mean_logits,"
    " Tensor log_sum_sq, Tensor counts, Tensor gradient_state)";
inline constexpr char vocabulary_shard_backward[] =
    "vocabulary_shard_backward(Tensor dloss, Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight,"
    " Tensor? temperature, Tensor? mix, Tensor counts, Tensor gradient_state, Tensor saved, int ignore_index, int reduction,"
    " float label_smoothing, float lse_square_scale, float? softcap, float logit_scale, bool use_token_scaling,"
    " ScalarType? accum_dtype, ScalarType? compute_dtype, ScalarType? logits_dtype, int first_class, int vocab_size, int chunk_rows,"
    " bool need_dx, bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)";
inline constexpr char vocabulary_shard_backward_[] =
    "vocabulary_shard_backward_(Tensor dloss, Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight,"
    " Tensor? temperature, Tensor? mix, Tensor counts, Tensor gradient_state, Tensor(a!) saved, int ignore_index, int reduction,"
    " float label_smoothing, float lse_square_scale, float? softcap, float logit_scale, bool use_token_scaling,"
    " ScalarType? accum_dtype, ScalarType? compute_dtype, ScalarType? logits_dtype, int first_class, int vocab_size, int chunk_rows,"
    " bool need_dx, bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)";

}  // namespace liger::schemas
