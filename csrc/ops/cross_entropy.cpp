// The ops cross_entropy and cross_entropy_backward.
#include "kernels/cross_entropy.h"

#include "ops/loss.h"
#include "schemas.h"

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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_op(const CrossEntropyArguments& a) {
  const Scope scope("cross_entropy", a.logits);
  const CrossEntropyOptions options = loss_options(a);
  const RowsView rows = as_rows(scope, a.logits);
  const Dtype acc = accumulator(rows.view.dtype);
  const Tensor target = contiguous(scope, a.target);
  const OptionalTensor weight = contiguous(scope, a.weight);

  const Counts counts = allocate_counts(scope, target, weight, {}, rows.cols, options, acc);
  // With label smoothing a row needs the sum of all weights; with reduction "none" no reduction follows that could count.
  const bool count_first = options.reduction == Reduction::none || options.label_smoothing != 0;
  if (count_first) cross_entropy_counts(counts.arguments, scope);
  LossRows losses(scope, a.logits, rows.rows, acc, a);
  Tensor lse = allocate(scope, {2, rows.rows}, acc, a.logits);
  CrossEntropyRows args = row_args(scope, rows, target, weight, counts.values, options);
  losses.point(args, 0);
  args.lse = lse.data_ptr();
  args.after_counts = count_first;
  if (rows.rows > 0) cross_entropy_forward(args, scope);
  losses.finish(counts, count_first);
  return {losses.loss, losses.z_loss, losses.token_accuracy, losses.predicted_tokens, lse, counts.values};
}

Tensor cross_entropy_backward_op(const CrossEntropyArguments& a) {
  const Scope scope("cross_entropy_backward", a.logits);
  const CrossEntropyOptions options = loss_options(a);
  const RowsView rows = as_rows(scope, a.logits);
  const Tensor target = contiguous(scope, a.target);
  const OptionalTensor weight = contiguous(scope, a.weight);

  Tensor dlogits = allocate_like(scope, a.logits);
  if (rows.rows == 0) return dlogits;
  const Tensor dloss = contiguous(scope, a.dloss);
  CrossEntropyBackward args = backward_args(row_args(scope, rows, target, weight, a.counts, options), a.lse, mutable_rows(dlogits));
  args.grad = {dloss.data_ptr(), options.reduction == Reduction::none ? 1 : 0, tensor_dtype(dloss)};
  cross_entropy_backward(args, scope);
  return dlogits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("cross_entropy", boxed<cross_entropy_op, check_cross_entropy, schemas::cross_entropy>);
  m.impl("cross_entropy_backward", boxed<cross_entropy_backward_op, check_cross_entropy_backward, schemas::cross_entropy_backward>);
}

}  // namespace liger::LIGER_BACKEND
