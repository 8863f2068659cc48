// What cross_entropy and fused_linear_cross_entropy share: the sums over all targets, per-row results and
// their reduction.
#pragma once
#include "checks/cross_entropy.h"
#include "kernels/cross_entropy.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

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
