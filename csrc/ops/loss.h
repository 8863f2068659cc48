// The parts that cross_entropy and fused_linear_cross_entropy share: the sums over all targets, the buffers of per-row results, and their
// reduction.
#pragma once
#include "checks/cross_entropy.h"
#include "kernels/cross_entropy.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

inline CrossEntropyOptions loss_options(const LossArguments& a) {
  return {a.ignore_index,      a.label_smoothing,      a.lse_square_scale, a.softcap.value_or(0),
          a.use_token_scaling, Reduction(a.reduction), a.logit_scale};
}

// The backward's arguments for rows of all classes. The caller sets the upstream gradient, and every other member that is not 0.
inline CrossEntropyBackward backward_args(const CrossEntropyRows& forward_args, const Tensor& lse, const MutableRows& dlogits) {
  return {.rows = forward_args.rows,
          .vocab = forward_args.vocab,
          .first_row = forward_args.first_row,
          .logits = forward_args.logits,
          .target = forward_args.target,
          .class_weight = forward_args.class_weight,
          .counts = forward_args.counts,
          .options = forward_args.options,
          .op = forward_args.op,
          .lse = lse.data_ptr(),
          .dlogits = dlogits,
          .classes = {0, forward_args.vocab},
          .temperature = forward_args.temperature};
}

// values: `size` elements that begin with the counts (CrossEntropyCounts). arguments: those with which
// cross_entropy_counts or the reduction computes the counts.
struct Counts {
  Tensor values;
  CrossEntropyCounts arguments;
};
Counts allocate_counts(const Scope& scope, const Tensor& target, const OptionalTensor& class_weight, const OptionalTensor& normalizer,
                       int64_t vocab, const CrossEntropyOptions& options, Dtype accumulator, int64_t size = CrossEntropyCounts::slots);

// The per-row losses of a whole batch, and the results that the op returns. The arguments must outlive it.
class LossRows {
 public:
  LossRows(const Scope& scope, const Tensor& like, int64_t rows, Dtype accumulator, const LossArguments&);
  // Points a chunk's arguments at its part of the buffers.
  void point(CrossEntropyRows& args, int64_t first_row) const;
  // Reduces the losses, after the last chunk. counted: the counts are computed already.
  void finish(const Counts& counts, bool counted);

  Tensor loss, z_loss, token_accuracy, predicted_tokens, entropy, mean_logits, log_sum_sq;
  const LossArguments& arguments;

 private:
  bool per_row() const { return Reduction(arguments.reduction) == Reduction::none; }

  const Scope& scope_;
  int64_t rows_;
  Dtype accumulator_;
  bool has_z_;
  Tensor ce_, z_, accuracy_;
};

}  // namespace liger::LIGER_BACKEND
