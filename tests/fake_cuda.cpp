// Replaces the CUDA runtime by that of a machine with several kinds of GPUs, so that a test can check device.cu without a GPU. As with the
// real one, a kernel's code and its clusters are those of the current device, and a failed call leaves its error for cudaGetLastError.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

namespace {

enum Kind { ampere, hopper, hopper_without_counts, hopper_in_trouble, no_code };
struct {
  int current = 0;
  cudaError_t last_error = cudaSuccess;
  bool in_trouble = true;
} machine;

cudaError_t failed(cudaError_t code) { return machine.last_error = code; }
bool is_hopper(int device) { return device != ampere; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Functions that the test calls.
int fake_current_device() { return machine.current; }
int fake_last_error() { return machine.last_error; }
void fake_recover() { machine.in_trouble = false; }

cudaError_t cudaGetDevice(int* device) {
  *device = machine.current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  machine.current = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = machine.last_error;
  machine.last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(properties->name, sizeof(properties->name), "device %d", device);
  properties->major = is_hopper(device) ? 9 : 8;
  properties->warpSize = 32;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerBlock = 1024;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = is_hopper(device) ? 227 << 10 : 163 << 10;
  properties->sharedMemPerMultiprocessor = is_hopper(device) ? 228 << 10 : 164 << 10;
  properties->l2CacheSize = 50 << 20;
  properties->totalGlobalMem = size_t{80} << 30;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (machine.current == no_code) return failed(cudaErrorNoKernelImageForDevice);
  if (machine.current == hopper_in_trouble && machine.in_trouble) return failed(cudaErrorMemoryAllocation);
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->ptxVersion = is_hopper(machine.current) ? 90 : 80;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return bytes > (is_hopper(machine.current) ? 227 << 10 : 163 << 10) ? failed(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* config) {
  *count = -1;  // the caller must not use it after a failure
  if (!is_hopper(machine.current) || machine.current == hopper_without_counts) return failed(cudaErrorInvalidClusterSize);
  const int blocks = int((228 << 10) / (config->dynamicSmemBytes + 1024));
  *count = 120 / int(config->gridDim.x) * blocks;
  return cudaSuccess;
}

// Functions that a CUDA object calls when it is loaded.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
}
#pragma GCC visibility pop
