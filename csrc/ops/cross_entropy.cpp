// The ops cross_entropy and cross_entropy_backward.
#include "kernels/cross_entropy.h"

#include "ops/loss.h"

namespace liger::LIGER_BACKEND {
namespace {

CrossEntropyRows row_args(const Scope& scope, const RowsView& logits, const Tensor& target, const OptionalTensor& weight,
                          const Tensor& counts, const CrossEntropyOptions& options) {
  CrossEntropyRows args{};
  args.rows = logits.rows;
  args.vocab = logits.cols;
  args.logits = logits;
  args.target = static_cast<const int64_t*>(target.data_ptr());
  args.class_weight = as_vector(weight);
  args.counts = counts.data_ptr();
  args.options = options;
  args.op = scope.op();
  return args;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_op(Tensor logits, Tensor target, OptionalTensor weight,
                                                                            int64_t ignore_index, int64_t reduction, double label_smoothing,
                                                                            double lse_square_scale, std::optional<double> softcap,
                                                                            bool return_z_loss, bool return_token_accuracy,
                                                                            bool return_predicted_tokens) {
  const Scope scope("cross_entropy", logits);
  const CrossEntropyOptions options = cross_entropy_options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap);
  const RowsView rows = as_rows(scope, logits);
  const Dtype acc = accumulator(rows.view.dtype);
  target = contiguous(scope, target);
  weight = contiguous(scope, weight);

  const Counts counts = allocate_counts(scope, target, weight, {}, rows.cols, options, acc);
  // With label smoothing a row needs the sum of all weights; with reduction "none" no reduction follows that could count.
  const bool count_first = options.reduction == Reduction::none || options.label_smoothing != 0;
  if (count_first) cross_entropy_counts(counts.arguments, scope);
  LossRows losses(scope, logits, rows.rows, acc, options, return_z_loss, return_token_accuracy, return_predicted_tokens);
  Tensor lse = allocate(scope, {2, rows.rows}, acc, logits);
  CrossEntropyRows args = row_args(scope, rows, target, weight, counts.values, options);
  losses.point(args, 0);
  args.lse = lse.data_ptr();
  args.after_counts = count_first;
  if (rows.rows > 0) cross_entropy_forward(args, scope);
  losses.finish(counts, count_first);
  return {losses.loss, losses.z_loss, losses.token_accuracy, losses.predicted_tokens, lse, counts.values};
}

Tensor cross_entropy_backward_op(Tensor dloss, Tensor logits, Tensor target, OptionalTensor weight, Tensor lse, Tensor counts,
                                 int64_t ignore_index, int64_t reduction, double label_smoothing, double lse_square_scale,
                                 std::optional<double> softcap) {
  const Scope scope("cross_entropy_backward", logits);
  const CrossEntropyOptions options = cross_entropy_options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap);
  const RowsView rows = as_rows(scope, logits);
  target = contiguous(scope, target);
  weight = contiguous(scope, weight);
  const bool per_row = options.reduction == Reduction::none;

  Tensor dlogits = allocate_like(scope, logits);
  if (rows.rows == 0) return dlogits;
  dloss = contiguous(scope, dloss);
  CrossEntropyBackward args = backward_args(row_args(scope, rows, target, weight, counts, options), lse, mutable_rows(dlogits));
  args.grad = {dloss.data_ptr(), per_row ? 1 : 0, tensor_dtype(dloss)};
  cross_entropy_backward(args, scope);
  return dlogits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("cross_entropy", boxed<cross_entropy_op, check_cross_entropy>);
  m.impl("cross_entropy_backward", boxed<cross_entropy_backward_op, check_cross_entropy_backward>);
}

}  // namespace liger::LIGER_BACKEND
