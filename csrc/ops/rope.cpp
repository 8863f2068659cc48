// The ops rope and rope_backward.
#include "kernels/rope.h"

#include "checks/rope.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor output_like(const Scope& scope, const Tensor& t) {
  if (!keeps_strides(t)) return allocate_like(scope, t);
  const auto strides = t.strides();
  return allocate(scope, tensor_sizes(t), {strides.begin(), strides.end()}, tensor_dtype(t), t);
}

Tensor readable(const Scope& scope, const Tensor& t) { return contiguous_heads(t) ? t : contiguous(scope, t); }

RopeHeads rope_heads(const Tensor& in, const Tensor& out) {
  return {in.data_ptr(), out.data_ptr(), in.size(1), in.stride(0), in.stride(1), in.stride(2), out.stride(0), out.stride(1), out.stride(2)};
}

// Rotates q and k or, in the backward, their gradients by the transposed rotation.
std::tuple<Tensor, Tensor> run(const char* op, Tensor q, OptionalTensor k, Tensor cos, Tensor sin, RopeLayout layout, bool half_tables,
                               bool transpose) {
  const Scope scope(op, q);
  cos = readable(scope, cos);
  sin = readable(scope, sin);
  Tensor q_out = output_like(scope, q), k_out = k ? output_like(scope, *k) : allocate(scope, {0}, tensor_dtype(q), q);
  if (q.numel() + k_out.numel() == 0) return {q_out, k_out};
  q = readable(scope, q);
  if (k) k = readable(scope, *k);
  const auto batch_stride = [](const Tensor& t) { return t.size(0) == 1 ? 0 : t.stride(0); };
  const bool before = layout != RopeLayout::halves, behind = layout == RopeLayout::interleaved;  // interleaved: the forward's input; output
  rope({.batch = q.size(0),
        .seq = q.size(2),
        .head_dim = q.size(3),
        .rotary_dim = half_tables ? 2 * cos.size(2) : cos.size(2),
        .dtype = tensor_dtype(q),
        .q = rope_heads(q, q_out),
        .k = k ? rope_heads(*k, k_out) : RopeHeads{},
        .cos = cos.data_ptr(),
        .sin = sin.data_ptr(),
        .table_dtype = tensor_dtype(cos),
        .cos_batch = batch_stride(cos),
        .cos_seq = cos.stride(1),
        .sin_batch = batch_stride(sin),
        .sin_seq = sin.stride(1),
        .transpose = transpose,
        .in_interleaved = transpose ? behind : before,
        .out_interleaved = transpose ? before : behind,
        .half_tables = half_tables},
       scope);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rope_op(Tensor q, OptionalTensor k, Tensor cos, Tensor sin, int64_t layout, bool half_tables) {
  return run("rope", q, k, cos, sin, RopeLayout(layout), half_tables, false);
}
std::tuple<Tensor, Tensor> rope_backward_op(Tensor dq, OptionalTensor dk, Tensor cos, Tensor sin, int64_t layout, bool half_tables) {
  return run("rope_backward", dq, dk, cos, sin, RopeLayout(layout), half_tables, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("rope", boxed<rope_op, check_rope>);
  m.impl("rope_backward", boxed<rope_backward_op, check_rope_backward>);
}

}  // namespace liger::LIGER_BACKEND
