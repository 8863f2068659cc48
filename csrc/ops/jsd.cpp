// The ops jsd and jsd_backward: the generalised Jensen-Shannon divergence.
#include "kernels/jsd.h"

#include "checks/jsd.h"
#include "ops/loss.h"

namespace liger::LIGER_BACKEND {
namespace {

// The inputs of forward and backward. The views keep tensors alive.
struct Inputs {
  RowsView log_q, log_p;
  OptionalTensor labels;
  JsdRows rows;
};

Inputs inputs(const Scope& scope, const Tensor& log_q, const Tensor& log_p, const OptionalTensor& labels, double beta,
              int64_t ignore_index) {
  Inputs in{as_rows(scope, log_q), as_rows(scope, log_p), contiguous(scope, labels), {}};
  const auto* const label_data = labels ? static_cast<const int64_t*>(in.labels->data_ptr()) : nullptr;
  in.rows = {in.log_q.rows, in.log_q.cols, in.log_q, in.log_p, label_data, ignore_index, beta};
  return in;
}

std::tuple<Tensor, Tensor> jsd_op(Tensor log_q, Tensor log_p, OptionalTensor shift_labels, double beta, int64_t ignore_index) {
  const Scope scope("jsd", log_q);
  const Inputs in = inputs(scope, log_q, log_p, shift_labels, beta, ignore_index);
  const Dtype acc = accumulator(in.rows.log_q.dtype);
  const Tensor loss = allocate(scope, {}, acc, log_q), counts = allocate(scope, {CrossEntropyCounts::slots}, acc, log_q),
               losses = allocate(scope, {in.rows.rows}, acc, log_q);
  CrossEntropyCounts counting{};
  counting.rows = in.rows.rows;
  counting.vocab = in.rows.vocab;
  counting.target = in.rows.labels;
  counting.options.ignore_index = ignore_index;
  counting.accumulator = acc;
  counting.counts = counts.data_ptr();
  const bool counted = in.rows.labels == nullptr && in.rows.rows > 0;  // jsd_forward stores the counts
  if (in.rows.rows > 0) jsd_forward({in.rows, losses.data_ptr(), counts.data_ptr()}, scope);
  cross_entropy_reduce({in.rows.rows, losses.data_ptr(), nullptr, nullptr, counts.data_ptr(), Reduction::mean, acc, loss.data_ptr(),
                        nullptr, nullptr, counted ? nullptr : &counting},
                       scope);
  return {loss, counts};
}

Tensor jsd_backward_op(Tensor dloss, Tensor log_q, Tensor log_p, OptionalTensor shift_labels, Tensor counts, double beta,
                       int64_t ignore_index) {
  const Scope scope("jsd_backward", log_q);
  const Inputs in = inputs(scope, log_q, log_p, shift_labels, beta, ignore_index);
  Tensor dlog_q = allocate_like(scope, log_q);
  if (in.rows.rows > 0) jsd_backward({in.rows, counts.data_ptr(), {dloss.data_ptr(), tensor_dtype(dloss)}, mutable_rows(dlog_q)}, scope);
  return dlog_q;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("jsd", boxed<jsd_op, check_jsd>);
  m.impl("jsd_backward", boxed<jsd_backward_op, check_jsd_backward>);
}

}  // namespace liger::LIGER_BACKEND
