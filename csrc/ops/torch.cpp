#include "ops/torch.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "kernels/device.h"
#include "kernels/errors.h"

// torch's C shim declares this function only for builds with a GPU's toolkit. Only the GPU libraries call it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace liger::LIGER_BACKEND {
namespace {

constexpr std::pair<ScalarType, const char*> names[] = {
    {ScalarType::Float, "torch.float32"},
    {ScalarType::Double, "torch.float64"},
    {ScalarType::BFloat16, "torch.bfloat16"},
    {ScalarType::Half, "torch.float16"},
    {ScalarType::Long, "torch.int64"},
    {ScalarType::Float8_e4m3fn, "torch.float8_e4m3fn"},
    {ScalarType::Float8_e4m3fnuz, "torch.float8_e4m3fnuz"},
    {ScalarType::Float8_e5m2, "torch.float8_e5m2"},
    {ScalarType::Float8_e5m2fnuz, "torch.float8_e5m2fnuz"},
    {ScalarType::Int, "torch.int32"},
    {ScalarType::Short, "torch.int16"},
    {ScalarType::Char, "torch.int8"},
    {ScalarType::Byte, "torch.uint8"},
    {ScalarType::UInt16, "torch.uint16"},
    {ScalarType::UInt32, "torch.uint32"},
    {ScalarType::UInt64, "torch.uint64"},
    {ScalarType::Bool, "torch.bool"},
    {ScalarType::ComplexHalf, "torch.complex32"},
    {ScalarType::ComplexFloat, "torch.complex64"},
    {ScalarType::ComplexDouble, "torch.complex128"},
};
constexpr ScalarType kernel_types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double};  // as in Dtype

int64_t element_bytes(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Long ? 8 : type == ScalarType::Float || type == ScalarType::Int ? 4 : 2;
}

// Out of memory has its own exception type: callers catch it and retry with less. After a failed kernel every allocation fails, too; then
// the error states the kernel's failure.
[[noreturn]] void throw_failed_allocation(const char* op, double bytes) {
  std::string cause = torch_error_text();
  if (cause.empty()) cause = device_failure();
  const std::string tried = text("liger_ext::", op, " tried to allocate ", int64_t(bytes / (1 << 20)), " MiB");
  if (!cause.empty() && !is_memory_error(cause)) throw std::runtime_error(text(tried, ", which failed: ", cause));
  throw OutOfMemory(text(has_streams ? "CUDA out of memory. " : "out of memory: ", tried, cause.empty() ? "" : "; torch: ", cause));
}

}  // namespace

const char* dtype_name(ScalarType type) {
  for (const auto& [named, name] : names)
    if (named == type) return name;
  return "an unsupported dtype";
}
ScalarType scalar_type(Dtype dtype) { return kernel_types[static_cast<int>(dtype)]; }
std::optional<Dtype> kernel_dtype(ScalarType type) {
  for (int i = 0; i < int(std::size(kernel_types)); ++i)
    if (kernel_types[i] == type) return Dtype(i);
  return {};
}
ScalarType tensor_type(const Tensor& t) {
  try {
    return t.scalar_type();
  } catch (const std::exception&) {  // a dtype without a name in the stable ABI
    return ScalarType::Undefined;
  }
}

bool same_device(const Tensor& t, const Tensor& like) {
  return t.is_cuda() == like.is_cuda() && t.is_cpu() == like.is_cpu() && t.get_device_index() == like.get_device_index();
}

Scope::Scope(const char* op, const Tensor& t) : op_(op) {
  if constexpr (has_streams) {
    stream_.device = t.get_device_index();
    guard_.emplace(stream_.device);
    aoti_torch_get_current_cuda_stream(stream_.device, &stream_.handle);
  }
  raise_reported_targets();
}

Tensor allocate_strided(const Scope& scope, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type,
                        const Tensor& like) {
  int32_t device_type = 0;
  aoti_torch_get_device_type(like.get(), &device_type);
  AtenTensorHandle handle = nullptr;
  const auto code = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                             torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device_type,
                                             like.get_device_index(), &handle);
  if (code != 0) {
    double elements = 1;  // the product may exceed an integer
    for (size_t i = 0; i < sizes.size(); ++i) elements += double(sizes[i] - 1) * double(strides[i]);
    throw_failed_allocation(scope.op(), elements * double(element_bytes(type)));
  }
  return Tensor(handle);
}

void zero(std::initializer_list<Tensor> tensors) {
  for (Tensor t : tensors) torch::stable::zero_(t);
}

}  // namespace liger::LIGER_BACKEND
