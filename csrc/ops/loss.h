// What cross_entropy and fused_linear_cross_entropy share: checked options, the sums over all targets, per-row results and
// their reduction.
#pragma once
#include "kernels/cross_entropy.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

// Throws ValueError for values outside their range; softcap absent is 0.
CrossEntropyOptions checked_options(const char* op, int64_t ignore_index, int64_t reduction, double label_smoothing,
                                    double lse_square_scale, std::optional<double> softcap, bool token_scaling);

// A target of int64, one per row, and class weights of the accumulator dtype, one per class; both contiguous.
Tensor checked_target(const char* op, const Tensor& target, int64_t rows, const Tensor& like, const char* like_name);
OptionalTensor checked_class_weight(const char* op, const OptionalTensor& weight, const char* name, int64_t vocab, Dtype accumulator,
                                    const Tensor& like);

// The counts' memory and how they are made; cross_entropy_counts, or the reduction, makes them.
struct Counts {
  Tensor values;
  CrossEntropyCounts how;
};
Counts counts_of(const Scope& scope, const Tensor& target, const OptionalTensor& class_weight, const Tensor* normalizer, int64_t vocab,
                 const CrossEntropyOptions& options, Dtype accumulator);

// Buffers for per-row losses of a whole batch, and what the op returns of them.
class LossRows {
 public:
  LossRows(const Scope& scope, const Tensor& like, int64_t rows, Dtype accumulator, const CrossEntropyOptions& options, bool return_z_loss,
           bool return_token_accuracy, bool return_predicted_tokens);
  // Points a chunk's arguments at its part of the buffers.
  void point(CrossEntropyRows& args, int64_t first_row) const;
  // Reduces; after the last chunk. `counted`: the counts are there.
  void finish(const Counts& counts, bool counted);

  Tensor loss, z_loss, token_accuracy, predicted_tokens;

 private:
  const Scope& scope_;
  int64_t rows_;
  Dtype accumulator_;
  CrossEntropyOptions options_;
  Tensor ce_, z_, accuracy_;
  bool has_z_, return_z_, return_accuracy_, return_predicted_;
};

}  // namespace liger::LIGER_BACKEND
