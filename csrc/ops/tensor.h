// Tensors for ops/: what checks ask of them, views as rows, allocation, the caller's stream. The only header that joins torch's stable ABI
// to the backends. Each ops file is compiled once for the CPU library and once for the GPU library.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "kernels/errors.h"
#include "kernels/types.h"
#include "ops/boxed.h"

namespace liger::LIGER_BACKEND {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What the tensors of this library's dispatch key have.
constexpr bool has_streams = LIGER_IS_GPU;

// What checks ask: python/tensor.h has the same names.
using Size = int64_t;
const char* dtype_name(ScalarType type);
ScalarType type_of(const Tensor& t);  // Undefined for one that the stable ABI has no name for
ScalarType scalar_type(Dtype dtype);
std::optional<Dtype> kernel_dtype(ScalarType type);
Dtype dtype_of(const Tensor& t);      // of one that was checked, or allocated here
bool same_device(const Tensor& t, const Tensor& like);
inline bool takes_float64(const Tensor&) { return !LIGER_IS_GPU; }

// A guard for the tensor's device and its current stream, for as long as an op runs.
class Scope {
 public:
  Scope(const char* op, const Tensor& t);
  operator Stream() const { return stream_; }
  const char* op() const { return op_; }

 private:
  const char* op_;
  Stream stream_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Too little memory becomes OutOfMemory, "CUDA out of memory. liger_ext::<op> tried to allocate N MiB"; another failure says its cause.
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, Dtype dtype, const Tensor& like);
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like);
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Dtype dtype,
                const Tensor& like);
Tensor allocate_like(const Scope& scope, const Tensor& like);                        // contiguous
Tensor allocate_like(const Scope& scope, const Tensor& like, Dtype dtype);
Tensor allocate_statistics(const Scope& scope, const Tensor& like, Dtype dtype);     // a number for each row, in dtype's accumulator
Tensor workspace(const Scope& scope, int64_t bytes, const Tensor& like);
void zero(std::initializer_list<Tensor> tensors);
// One is overwritten while the other is read. Memory between a tensor's first and last element counts as its own.
void require_apart(const Scope& scope, const Tensor& written, const char* name, const Tensor& read, const char* read_name);
std::vector<int64_t> sizes_of(const Tensor& t);

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
Vector vector_of(const OptionalTensor& t);            // contiguous; data nullptr if absent
Tensor contiguous(const Scope& scope, const Tensor& t);   // itself, or a copy
OptionalTensor contiguous(const Scope& scope, const OptionalTensor& t);

// The address `elements` further; of no data, no data.
template <class Data> Data* at(Data* data, int64_t elements, Dtype dtype) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  return data ? static_cast<Byte*>(data) + elements * size_of(dtype) : nullptr;
}

}  // namespace liger::LIGER_BACKEND
