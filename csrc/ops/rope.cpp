#include "kernels/rope.h"

#include <algorithm>

#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

// Do the strides place every element in its own slot with no gaps, in some order of dimensions? Then an output can have them.
bool dense(const Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) != 1) dims.emplace_back(t.stride(i), t.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// Kernels take the columns of a head one after the other.
bool contiguous_heads(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1;
}

// The input's strides where they are dense and the kernels can write them (Hugging Face's transposed layout stays), else contiguous.
Tensor output_like(const Scope& scope, const Tensor& t) {
  if (t.is_contiguous() || !contiguous_heads(t) || !dense(t)) return allocate_like(scope, t);
  const auto strides = t.strides();
  return allocate(scope, sizes_of(t), {strides.begin(), strides.end()}, dtype_of(t, "q"), t);
}

Tensor readable(const char* op, const Tensor& t) { return contiguous_heads(t) ? t : contiguous(op, t); }

RopeHeads heads_of(const Tensor& in, const Tensor& out) {
  return {in.data_ptr(), out.data_ptr(), in.size(1), in.stride(0), in.stride(1), in.stride(2), out.stride(0), out.stride(1), out.stride(2)};
}

void check_table(const char* op, const Tensor& table, const char* name, const Tensor& q, const char* q_name) {
  check_device(op, table, name, q, q_name);
  require(table.dim() == 3 && (table.size(0) == 1 || table.size(0) == q.size(0)) && table.size(1) == q.size(2), op, ": ", name,
          " has shape ", shape_text(table), ", expected (1 or ", q.size(0), ", ", q.size(2), ", rotary_dim)");
  require(table.size(2) % 2 == 0 && table.size(2) <= q.size(3), op, ": ", name, " has rotary_dim ", table.size(2),
          ", expected an even number of at most head_dim ", q.size(3));
}

// Forward: q and k; backward: their gradients, by the transposed rotation.
std::tuple<Tensor, Tensor> run(const char* op, Tensor q, Tensor k, Tensor cos, Tensor sin, bool transpose) {
  const char *const q_name = transpose ? "dq" : "q", *const k_name = transpose ? "dk" : "k";
  const Scope scope(op, q, q_name);
  check_defined(op, k, k_name);
  require(q.dim() == 4, op, ": ", q_name, " has shape ", shape_text(q), ", expected (batch, heads, seq, head_dim)");
  require(k.dim() == 4 && k.size(0) == q.size(0) && k.size(2) == q.size(2) && k.size(3) == q.size(3), op, ": ", k_name, " has shape ",
          shape_text(k), ", expected (", q.size(0), ", heads, ", q.size(2), ", ", q.size(3), ")");
  check_device(op, k, k_name, q, q_name);
  require(type_of(k) == type_of(q), op, ": ", k_name, " has dtype ", dtype_name(type_of(k)), ", expected that of ", q_name, ", ",
          dtype_name(type_of(q)));
  check_table(op, cos, "cos", q, q_name);
  check_table(op, sin, "sin", q, q_name);
  require(cos.size(2) == sin.size(2) && type_of(cos) == type_of(sin), op, ": cos and sin differ in rotary_dim or dtype");
  const Dtype dtype = dtype_of(q, q_name), table_dtype = dtype_of(cos, "cos");

  cos = readable(op, cos);
  sin = readable(op, sin);
  Tensor q_out = output_like(scope, q), k_out = output_like(scope, k);
  if (q.numel() + k.numel() == 0) return {q_out, k_out};
  q = readable(op, q);
  k = readable(op, k);
  const auto batch_stride = [](const Tensor& t) { return t.size(0) == 1 ? 0 : t.stride(0); };
  rope({q.size(0), q.size(2), q.size(3), cos.size(2), dtype, heads_of(q, q_out), heads_of(k, k_out), cos.data_ptr(), sin.data_ptr(),
        table_dtype, batch_stride(cos), cos.stride(1), batch_stride(sin), sin.stride(1), transpose},
       scope);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rope_op(Tensor q, Tensor k, Tensor cos, Tensor sin) { return run("rope", q, k, cos, sin, false); }
std::tuple<Tensor, Tensor> rope_backward_op(Tensor dq, Tensor dk, Tensor cos, Tensor sin) {
  return run("rope_backward", dq, dk, cos, sin, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("rope", boxed<rope_op>);
  m.impl("rope_backward", boxed<rope_backward_op>);
}

}  // namespace liger::LIGER_BACKEND
