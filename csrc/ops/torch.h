// Tensors of torch's stable ABI, the device's stream, and allocation, for ops/tensor.h. Of the headers in ops/, only this one and boxed.h
// include torch's. trace/tensor.h declares the same names for tensors without data.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "kernels/types.h"
#include "ops/boxed.h"

namespace liger::LIGER_BACKEND {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Whether the tensors of this library's dispatch key are on a device with streams.
constexpr bool has_streams = LIGER_IS_GPU;

const char* dtype_name(ScalarType type);
ScalarType tensor_type(const Tensor& t);  // Undefined for a dtype without a name in the stable ABI
ScalarType scalar_type(Dtype dtype);
std::optional<Dtype> kernel_dtype(ScalarType type);
bool same_device(const Tensor& t, const Tensor& like);
inline bool takes_float64(const Tensor&) { return !LIGER_IS_GPU; }

// Selects the tensor's device for as long as an op runs, and passes the device's current stream to kernels. The constructor throws the
// error of a bad target that an earlier kernel has recorded (kernels/device.h).
class Scope {
 public:
  Scope(const char* op, const Tensor& t);
  operator Stream() const { return stream_; }
  const char* op() const { return op_; }

  // The number of equal ranges for which for_each_range (ops/tensor.h) makes one call: more than one in the trace alone.
  struct Repeated {
    static constexpr int64_t count = 1;
  };
  static Repeated repeated(int64_t, int64_t, int64_t) { return {}; }

 private:
  const char* op_;
  Stream stream_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Throws OutOfMemory, on a GPU "CUDA out of memory. liger_ext::<op> tried to allocate N MiB", if there is too little memory; any other
// failure throws with its cause.
Tensor allocate_strided(const Scope& scope, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type,
                        const Tensor& like);
inline Tensor narrow_view(Tensor t, int64_t dim, int64_t start, int64_t length) { return torch::stable::narrow(t, dim, start, length); }
inline void copy_into(Tensor to, const Tensor& from) { torch::stable::copy_(to, from); }
void zero(std::initializer_list<Tensor> tensors);

}  // namespace liger::LIGER_BACKEND
