#include "kernels/rope.h"

#include "checks/rope.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor output_like(const Scope& scope, const Tensor& t) {
  if (!keeps_strides(t)) return allocate_like(scope, t);
  const auto strides = t.strides();
  return allocate(scope, sizes_of(t), {strides.begin(), strides.end()}, dtype_of(t), t);
}

Tensor readable(const Scope& scope, const Tensor& t) { return contiguous_heads(t) ? t : contiguous(scope, t); }

RopeHeads heads_of(const Tensor& in, const Tensor& out) {
  return {in.data_ptr(), out.data_ptr(), in.size(1), in.stride(0), in.stride(1), in.stride(2), out.stride(0), out.stride(1), out.stride(2)};
}

// Forward: q and k; backward: their gradients, by the transposed rotation.
std::tuple<Tensor, Tensor> run(const char* op, Tensor q, Tensor k, Tensor cos, Tensor sin, bool transpose) {
  const Scope scope(op, q);
  cos = readable(scope, cos);
  sin = readable(scope, sin);
  Tensor q_out = output_like(scope, q), k_out = output_like(scope, k);
  if (q.numel() + k.numel() == 0) return {q_out, k_out};
  q = readable(scope, q);
  k = readable(scope, k);
  const auto batch_stride = [](const Tensor& t) { return t.size(0) == 1 ? 0 : t.stride(0); };
  rope({q.size(0), q.size(2), q.size(3), cos.size(2), dtype_of(q), heads_of(q, q_out), heads_of(k, k_out), cos.data_ptr(), sin.data_ptr(),
        dtype_of(cos), batch_stride(cos), cos.stride(1), batch_stride(sin), sin.stride(1), transpose},
       scope);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rope_op(Tensor q, Tensor k, Tensor cos, Tensor sin) { return run("rope", q, k, cos, sin, false); }
std::tuple<Tensor, Tensor> rope_backward_op(Tensor dq, Tensor dk, Tensor cos, Tensor sin) {
  return run("rope_backward", dq, dk, cos, sin, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("rope", boxed<rope_op, check_rope>);
  m.impl("rope_backward", boxed<rope_backward_op, check_rope_backward>);
}

}  // namespace liger::LIGER_BACKEND
