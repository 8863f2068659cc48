// Replaces the HIP runtime, hipBLAS and torch's GPU library, so that the GPU library serves CPU tensors. Its checks, plans, arguments and
// launches are the real ones. Each launch goes to the Python function that executes the code object (tests/amd/device.py).
#include <hip/hip_runtime_api.h>
#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <new>
#include <string>

namespace {

// Device memory, shared with the forked process in which a kernel runs. It lies at the end of its pages, between two pages without access.
// It is filled with NaNs, and the rest of its pages with a pattern.
struct Memory {
  static constexpr size_t page = 4096;
  static constexpr unsigned char pattern = 0xcd;
  char *mapping, *data;
  size_t pages, bytes;

  explicit Memory(size_t size) : pages(page + size / page * page), bytes(size) {
    mapping =
        static_cast<char*>(mmap(nullptr, pages + 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapping, page, PROT_NONE);
    mprotect(mapping + page + pages, page, PROT_NONE);
    data = mapping + page + pages - (size + 15) / 16 * 16;
    std::memset(mapping + page, pattern, pages);
    std::memset(data, 0xff, bytes);
  }
  bool intact() const {
    const auto untouched = [](const char* from, const char* to) {
      for (; from < to; ++from)
        if (static_cast<unsigned char>(*from) != pattern) return false;
      return true;
    };
    return untouched(mapping + page, data) && untouched(data + bytes, mapping + page + pages);
  }
};

std::map<void*, Memory>& allocations() {
  static std::map<void*, Memory> all;
  return all;
}

std::map<const void*, std::string>& names() {  // of kernels and variables, by the host's address of each
  static std::map<const void*, std::string> all;
  return all;
}

using Launch = int (*)(const char* kernel, int grid, int block, int shared_bytes, const void* arguments);
using Variable = void* (*)(const char* name);
struct {
  char arch[32] = "";
  int warp = 0, multiprocessors = 0, shared_bytes = 0;
  Launch launch = nullptr;
  Variable variable = nullptr;
  std::string failure;
} device;

}  // namespace

// ---------------------------------------------------------------- called from Python
#pragma GCC visibility push(default)  // exports.map lists the functions that other libraries see
extern "C" {

void emulated_device(const char* arch, int warp, int multiprocessors, int shared_bytes, Launch launch, Variable variable) {
  std::snprintf(device.arch, sizeof(device.arch), "%s", arch);
  device.warp = warp;
  device.multiprocessors = multiprocessors;
  device.shared_bytes = shared_bytes;
  device.launch = launch;
  device.variable = variable;
}
void emulated_failure(const char* text) { device.failure = text; }
void* emulated_allocate(size_t bytes) {
  const Memory allocation(bytes);
  allocations().emplace(allocation.data, allocation);
  return allocation.data;
}
void emulated_free(void* data) {
  const auto found = allocations().find(data);
  munmap(found->second.mapping, found->second.pages + 2 * Memory::page);
  allocations().erase(found);
}

// ---------------------------------------------------------------- HIP
void** __hipRegisterFatBinary(const void*) {
  static void* handle;
  return &handle;
}
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(void**, const void* host, char*, const char* name, unsigned, void*, void*, void*, void*, int*) {
  names()[host] = name;
}
void __hipRegisterVar(void**, void* host, char*, const char* name, int, size_t, int, int) { names()[host] = name; }
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t, hipStream_t) { return hipErrorUnknown; }  // of <<<>>>, which nothing uses
hipError_t __hipPopCallConfiguration(dim3*, dim3*, size_t*, hipStream_t*) { return hipErrorUnknown; }

hipError_t hipLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes, hipStream_t) {
  const std::string& name = names().at(function);
  if (device.launch(name.c_str(), int(grid.x), int(block.x), int(shared_bytes), arguments[0]) != 0) return hipErrorLaunchFailure;
  for (const auto& [data, memory] : allocations())
    if (!memory.intact()) {
      device.failure = name + " wrote outside of its " + std::to_string(memory.bytes) + " bytes";
      return hipErrorIllegalAddress;
    }
  return hipSuccess;
}
hipError_t hipGetSymbolAddress(void** address, const void* host) {
  *address = device.variable(names().at(host).c_str());
  if (*address == nullptr) device.failure = names().at(host) + " is not in the code object";
  return *address == nullptr ? hipErrorInvalidSymbol : hipSuccess;
}
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(properties->name, sizeof(properties->name), "emulated %s", device.arch);
  std::snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "%s", device.arch);
  properties->warpSize = device.warp;
  properties->multiProcessorCount = device.multiprocessors;
  properties->maxThreadsPerBlock = 1024;
  properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = properties->maxSharedMemoryPerMultiProcessor = device.shared_bytes;
  properties->l2CacheSize = 4 << 20;
  properties->totalGlobalMem = size_t{1} << 30;
  return hipSuccess;
}
hipError_t hipGetDevice(int* index) {
  *index = 0;
  return hipSuccess;
}
hipError_t hipGetLastError() { return hipSuccess; }
hipError_t hipFree(void*) { return hipSuccess; }
const char* hipGetErrorString(hipError_t) { return device.failure.c_str(); }
hipError_t hipHostMalloc(void** memory, size_t bytes, unsigned) {
  *memory = emulated_allocate(bytes);
  return hipSuccess;
}
hipError_t hipHostGetDevicePointer(void** address, void* host, unsigned) {
  *address = host;
  return hipSuccess;
}
hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode*) { return hipSuccess; }

// ---------------------------------------------------------------- torch: the device of an op, and allocation on it
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = 0;
  return 0;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
                                        int32_t, AtenTensorHandle* tensor) {
  int64_t elements = 1;
  for (int64_t i = 0; i < dims; ++i) elements = sizes[i] == 0 || elements == 0 ? 0 : elements + (sizes[i] - 1) * strides[i];
  void* data = emulated_allocate(size_t(elements) * aoti_torch_dtype_element_size(dtype));
  return torch_from_blob(
      data, dims, sizes, strides, 0, dtype, device_type, -1, tensor, aoti_torch_layout_strided(), nullptr, 0,
      [](void* memory, void*) { emulated_free(memory); }, nullptr);
}

// ---------------------------------------------------------------- hipBLAS: the functions that csrc/gpu/gemm.cu looks up
int32_t torch_get_current_cuda_blas_handle(void** handle) {
  static int pointer_mode = 0;
  *handle = &pointer_mode;
  return 0;
}
int hipblasGetPointerMode(void* handle, int* mode) {
  *mode = *static_cast<int*>(handle);
  return 0;
}
int hipblasSetPointerMode(void* handle, int mode) {
  *static_cast<int*>(handle) = mode;
  return 0;
}

// Column-major, every sum in double: the kernels that read the products are tested, not the products.
int hipblasGemmEx(void*, int transa, int transb, int m, int n, int k, const float* alpha, const void* a, int type, int lda, const void* b,
                  int, int ldb, const float* beta, void* c, int c_type, int ldc, int, int) {
  constexpr int real_f16 = 2, real_bf16 = 14, normal = 111;
  const auto read = [](const void* from, int type, int64_t at) -> double {
    if (type == real_f16) return float(static_cast<const c10::Half*>(from)[at]);
    if (type == real_bf16) return float(static_cast<const c10::BFloat16*>(from)[at]);
    return static_cast<const float*>(from)[at];
  };
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += read(a, type, transa == normal ? i + l * lda : l + i * lda) * read(b, type, transb == normal ? l + j * ldb : j + l * ldb);
      const int64_t at = i + j * ldc;
      const float result = float(*alpha * sum + (*beta == 0 ? 0 : *beta * read(c, c_type, at)));
      if (c_type == real_f16) static_cast<c10::Half*>(c)[at] = result;
      else if (c_type == real_bf16) static_cast<c10::BFloat16*>(c)[at] = result;
      else static_cast<float*>(c)[at] = result;
    }
  return 0;
}
}
#pragma GCC visibility pop
