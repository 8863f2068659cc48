#include "ops/tensor.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "checks/tensor.h"
#include "kernels/device.h"

// The shim declares it for builds with a GPU's toolkit alone; it is called in those alone.
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
constexpr ScalarType of_kernels[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double};  // as in Dtype

}  // namespace

const char* dtype_name(ScalarType type) {
  for (const auto& [named, name] : names)
    if (named == type) return name;
  return "an unsupported dtype";
}
ScalarType scalar_type(Dtype dtype) { return of_kernels[static_cast<int>(dtype)]; }
std::optional<Dtype> kernel_dtype(ScalarType type) {
  for (int i = 0; i < int(std::size(of_kernels)); ++i)
    if (of_kernels[i] == type) return Dtype(i);
  return {};
}
ScalarType type_of(const Tensor& t) {
  try {
    return t.scalar_type();
  } catch (const std::exception&) {  // one that the stable ABI has no name for
    return ScalarType::Undefined;
  }
}

Dtype dtype_of(const Tensor& t) { return kernel_dtype(type_of(t)).value(); }

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

std::vector<int64_t> sizes_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.begin(), sizes.end()};
}

namespace {

int64_t element_bytes(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Long ? 8 : type == ScalarType::Float || type == ScalarType::Int ? 4 : 2;
}

// Too little memory is an error of its own, which callers catch to try again with less. After a failed kernel every allocation fails, too.
[[noreturn]] void throw_failed_allocation(const char* op, double bytes) {
  std::string cause = torch_said();
  if (cause.empty()) cause = device_failure();
  const std::string tried = text("liger_ext::", op, " tried to allocate ", int64_t(bytes / (1 << 20)), " MiB");
  if (!cause.empty() && !says_out_of_memory(cause)) throw std::runtime_error(text(tried, ", which failed: ", cause));
  throw OutOfMemory(text(has_streams ? "CUDA out of memory. " : "out of memory: ", tried, cause.empty() ? "" : "; torch: ", cause));
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
    double elements = 1;  // more than an integer holds, perhaps
    for (size_t i = 0; i < sizes.size(); ++i) elements += double(sizes[i] - 1) * double(strides[i]);
    throw_failed_allocation(scope.op(), elements * double(element_bytes(type)));
  }
  return Tensor(handle);
}

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
  torch::stable::copy_(copy, t);
  return copy;
}
Tensor allocate(const Scope& scope, const std::vector<int64_t>& sizes, Dtype dtype, const Tensor& like) {
  return allocate(scope, sizes, scalar_type(dtype), like);
}
Tensor allocate_like(const Scope& scope, const Tensor& like, Dtype dtype) { return allocate(scope, sizes_of(like), dtype, like); }
Tensor allocate_like(const Scope& scope, const Tensor& like) { return allocate(scope, sizes_of(like), type_of(like), like); }
Tensor allocate_statistics(const Scope& scope, const Tensor& like, Dtype dtype) {
  auto leading = sizes_of(like);
  leading.pop_back();
  return allocate(scope, leading, accumulator(dtype), like);
}
Tensor workspace(const Scope& scope, int64_t bytes, const Tensor& like) {
  return allocate(scope, {(bytes + 3) / 4}, ScalarType::Float, like);
}

void zero(std::initializer_list<Tensor> tensors) {
  for (Tensor t : tensors) torch::stable::zero_(t);
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
  out.view = {out.tensor.data_ptr(), stride, dtype_of(t)};
  return out;
}

MutableRows mutable_rows(const Tensor& t) { return {t.data_ptr(), t.dim() == 0 ? 1 : t.size(t.dim() - 1), dtype_of(t)}; }
MutableVector mutable_vector(const Tensor& t) { return t.numel() > 0 ? MutableVector{t.data_ptr(), dtype_of(t)} : MutableVector{}; }
Vector vector_of(const OptionalTensor& t) { return t ? Vector{t->data_ptr(), dtype_of(*t)} : Vector{}; }

OptionalTensor contiguous(const Scope& scope, const OptionalTensor& t) { return t ? OptionalTensor(contiguous(scope, *t)) : t; }

void require_apart(const Scope& scope, const Tensor& written, const char* name, const Tensor& read, const char* read_name) {
  const auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return at(static_cast<const char*>(t.data_ptr()), last + 1, dtype_of(t));
  };
  require(written.numel() == 0 || end(written) <= read.data_ptr() || end(read) <= written.data_ptr(), scope.op(), ": ", name,
          " shares memory with ", read_name, ", expected memory of its own, since it is overwritten");
}

}  // namespace liger::LIGER_BACKEND
