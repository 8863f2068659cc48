// Checks the arguments of rope and of its backward, and determines the strides of the outputs. The backward has the same arguments, with
// the gradients of the two outputs in place of q and k.
#pragma once
#include <utility>
#include <vector>

#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_rope_table(const char* op, const Tensor& table, const char* name, const Tensor& q, const char* q_name, bool half) {
  check_device(op, table, name, q, q_name);
  const bool fits = table.dim() == 3 && (table.size(0) == 1 || table.size(0) == q.size(0)) && table.size(1) == q.size(2);
  require(fits, op, ": ", name, " has shape ", shape_text(table), ", expected (1 or batch, ", q.size(2),
          half ? ", half of rotary_dim) with batch " : ", rotary_dim) with batch ", q.size(0));
  if (half)
    require(table.size(2) * 2 <= q.size(3), op, ": ", name, " has ", table.size(2), " columns, expected at most half of head_dim ",
            q.size(3));
  else
    require(table.size(2) % 2 == 0 && table.size(2) <= q.size(3), op, ": ", name, " has rotary_dim ", table.size(2),
            ", expected an even number of at most head_dim ", q.size(3));
  check_dtype(op, table, name);
}

inline void check_rope_heads(const char* op, const Tensor& q, const char* q_name, const OptionalTensor& k, const char* k_name,
                             const Tensor& cos, const Tensor& sin, int64_t layout, bool half_tables) {
  check_defined(op, q, q_name);
  require(q.dim() == 4, op, ": ", q_name, " has shape ", shape_text(q), ", expected (batch, heads, seq, head_dim)");
  check_dtype(op, q, q_name);
  if (k) {
    check_device(op, *k, k_name, q, q_name);
    require(k->dim() == 4 && k->size(0) == q.size(0) && k->size(2) == q.size(2) && k->size(3) == q.size(3), op, ": ", k_name, " has shape ",
            shape_text(*k), ", expected (", q.size(0), ", heads, ", q.size(2), ", ", q.size(3), ")");
    check_same_dtype(op, *k, k_name, q, q_name);
  }
  check_rope_table(op, cos, "cos", q, q_name, half_tables);
  check_rope_table(op, sin, "sin", q, q_name, half_tables);
  require(cos.size(2) == sin.size(2), op, ": sin has rotary_dim ", sin.size(2), ", expected that of cos, ", cos.size(2));
  check_same_dtype(op, sin, "sin", cos, "cos");
  require(layout >= 0 && layout <= 2, op, ": layout is ", layout, ", expected 0 (halves), 1 (interleaved) or 2 (interleaved_to_halves)");
}

inline void check_rope(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin, int64_t layout, bool half_tables) {
  check_rope_heads("rope", q, "q", k, "k", cos, sin, layout, half_tables);
}

inline void check_rope_backward(const Tensor& dq, const OptionalTensor& dk, const Tensor& cos, const Tensor& sin, int64_t layout,
                                bool half_tables) {
  check_rope_heads("rope_backward", dq, "dq", dk, "dk", cos, sin, layout, half_tables);
}

// Returns whether the strides of the dimensions, in some order, are those of a contiguous tensor: an output can have such strides.
inline bool dense(const Tensor& t) {
  std::vector<std::pair<Size, Size>> dims;  // stride, size
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) != 1) dims.emplace_back(t.stride(i), t.size(i));
  std::sort(dims.begin(), dims.end());
  Size expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected = expected * size;
  }
  return true;
}

// Returns whether the columns of a head are contiguous, as kernels require.
inline bool contiguous_heads(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1;
}

// Returns whether the output has the input's strides: if they are dense and the kernels can write them (Hugging Face's transposed layout).
// Otherwise the output is contiguous.
inline bool keeps_strides(const Tensor& t) { return !t.is_contiguous() && contiguous_heads(t) && dense(t); }

}  // namespace liger::LIGER_BACKEND
