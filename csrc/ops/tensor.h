// Tensors for ops/: allocation, and tensors as rows. Each ops file is compiled once for the CPU library and once for the GPU library, with
// torch's tensors. It is also compiled for the trace (trace/library.h), whose tensors have no data.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/errors.h"
#include "kernels/types.h"
#ifdef LIGER_IS_TRACE
#include "trace/library.h"
#else
#include "ops/torch.h"
#endif

namespace liger::LIGER_BACKEND {

using OptionalTensor = std::optional<Tensor>;
using Size = int64_t;  // python/tensor.h has another one, for checks

Dtype tensor_dtype(const Tensor& t);      // of a tensor that was checked, or allocated here

Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, Dtype dtype, const Tensor& like);
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like);
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Dtype dtype,
                const Tensor& like);
Tensor allocate_like(const Scope& scope, const Tensor& like);                        // contiguous
Tensor allocate_like(const Scope& scope, const Tensor& like, Dtype dtype);
Tensor allocate_statistics(const Scope& scope, const Tensor& like, Dtype dtype);     // a number for each row, in dtype's accumulator
Tensor workspace(const Scope& scope, int64_t bytes, const Tensor& like);
// Throws if the tensors share memory: `written` is overwritten while `read` is read. All memory between a tensor's first and last element
// counts as its own.
void require_apart(const Scope& scope, const Tensor& written, const char* name, const Tensor& read, const char* read_name);
std::vector<int64_t> tensor_sizes(const Tensor& t);

// A checked tensor seen as a matrix of rows over its last dimension. Keeps a contiguous copy alive where its strides allow no such view.
struct RowsView {
  Tensor tensor;
  int64_t rows = 0, cols = 0;
  Rows view;
  operator Rows() const { return view; }
};
RowsView as_rows(const Scope& scope, const Tensor& t);
MutableRows mutable_rows(const Tensor& t);            // a tensor this op allocated, contiguous
MutableVector mutable_vector(const Tensor& t);        // likewise; absent if it is empty
Vector as_vector(const OptionalTensor& t);            // contiguous; data nullptr if absent
Tensor contiguous(const Scope& scope, const Tensor& t);   // itself, or a copy
OptionalTensor contiguous(const Scope& scope, const OptionalTensor& t);

struct Range {
  int64_t first, count;
};
// Calls f(range) for each range of `step` in [0, total); the last one may be shorter. The trace makes one call for several equal ranges.
template <class F> void for_each_range(const Scope& scope, int64_t total, int64_t step, F f) {
  for (int64_t first = 0; first < total;) {
    const auto repeated = scope.repeated(first, total, step);
    f(Range{first, std::min(step, total - first)});
    first += repeated.count * step;
  }
}

}  // namespace liger::LIGER_BACKEND
