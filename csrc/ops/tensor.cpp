#include "ops/tensor.h"

#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

Dtype tensor_dtype(const Tensor& t) { return kernel_dtype(tensor_type(t)).value(); }

std::vector<int64_t> tensor_sizes(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.begin(), sizes.end()};
}

namespace {

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t numel = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = numel;
    numel *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

}  // namespace

Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Dtype dtype,
                const Tensor& like) {
  return allocate_strided(scope, sizes, strides, scalar_type(dtype), like);
}
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  return allocate_strided(scope, sizes, contiguous_strides(sizes), type, like);
}
Tensor contiguous(const Scope& scope, const Tensor& t) {
  if (t.is_contiguous()) return t;
  Tensor copy = allocate_like(scope, t);
  copy_into(copy, t);
  return copy;
}
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, Dtype dtype, const Tensor& like) {
  return allocate(scope, sizes, scalar_type(dtype), like);
}
Tensor allocate_like(const Scope& scope, const Tensor& like, Dtype dtype) { return allocate(scope, tensor_sizes(like), dtype, like); }
Tensor allocate_like(const Scope& scope, const Tensor& like) { return allocate(scope, tensor_sizes(like), tensor_type(like), like); }
Tensor allocate_statistics(const Scope& scope, const Tensor& like, Dtype dtype) {
  auto leading = tensor_sizes(like);
  leading.pop_back();
  return allocate(scope, leading, accumulator(dtype), like);
}
Tensor workspace(const Scope& scope, int64_t bytes, const Tensor& like) {
  return allocate(scope, {(bytes + 3) / 4}, scalar_type(Dtype::f32), like);
}

RowsView as_rows(const Scope& scope, const Tensor& t) {
  RowsView out{t, 1, t.size(t.dim() - 1), {}};
  for (int64_t i = 0; i + 1 < t.dim(); ++i) out.rows *= t.size(i);
  // One stride for all rows: every leading dimension longer than 1 must continue the one inside it.
  int64_t stride = out.cols, span = 0;
  bool first = true;
  bool regular = out.cols <= 1 || t.stride(t.dim() - 1) == 1;
  for (int64_t i = t.dim() - 2; regular && i >= 0; --i) {
    if (t.size(i) <= 1) continue;
    if (first) stride = t.stride(i);
    else regular = t.stride(i) == span;
    first = false;
    span = t.stride(i) * t.size(i);
  }
  if (!regular || stride < 0) {
    out.tensor = contiguous(scope, t);
    stride = out.cols;
  }
  out.view = {out.tensor.data_ptr(), stride, tensor_dtype(t)};
  return out;
}

MutableRows mutable_rows(const Tensor& t) { return {t.data_ptr(), t.dim() == 0 ? 1 : t.size(t.dim() - 1), tensor_dtype(t)}; }
MutableVector mutable_vector(const Tensor& t) { return t.numel() > 0 ? MutableVector{t.data_ptr(), tensor_dtype(t)} : MutableVector{}; }
Vector as_vector(const OptionalTensor& t) { return t ? Vector{t->data_ptr(), tensor_dtype(*t)} : Vector{}; }

OptionalTensor contiguous(const Scope& scope, const OptionalTensor& t) { return t ? OptionalTensor(contiguous(scope, *t)) : t; }

void require_apart(const Scope& scope, const Tensor& written, const char* name, const Tensor& read, const char* read_name) {
  const auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return at(static_cast<const char*>(t.data_ptr()), last + 1, tensor_dtype(t));
  };
  require(written.numel() == 0 || end(written) <= read.data_ptr() || end(read) <= written.data_ptr(), scope.op(), ": ", name,
          " shares memory with ", read_name, ", expected memory of its own, since it is overwritten");
}

}  // namespace liger::LIGER_BACKEND
