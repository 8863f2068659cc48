// The runtime functions that device.cu calls, for CUDA, HIP and the host target: device profiles, error texts, pinned memory.
#pragma once
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpu/platform.h"
#if !defined(__CUDACC__) && !defined(__HIPCC__) && !defined(__HIP__)
#include "gpu/host/memory.h"
#endif

namespace liger::gpu::runtime {

#if defined(__HIPCC__) || defined(__HIP__)

// The list of targets comes from the build: compilers for HIP, unlike nvcc, define no macro with it.
#ifndef LIGER_EXT_GPU_ARCHS
#define LIGER_EXT_GPU_ARCHS "targets that its build did not record"
#endif

inline void check(hipError_t code, const char* what) {
  if (code != hipSuccess) throw_launch_error(code, what);
}
// Returns the architecture without the driver's options: gfx942 for gfx942:sramecc+:xnack-.
inline std::string gfx_name(const hipDeviceProp_t& properties) {
  const std::string name = properties.gcnArchName;
  return name.substr(0, name.find(':'));
}
inline launch::DeviceProfile read_profile(int device) {
  hipDeviceProp_t properties;
  check(hipGetDeviceProperties(&properties, device), "reading a device's properties");
  launch::DeviceProfile profile;
  std::strncpy(profile.name, properties.name, sizeof(profile.name) - 1);
  profile.vendor = launch::Vendor::amd;
  profile.arch = int(std::strtol(gfx_name(properties).c_str() + 3, nullptr, 16));
  profile.warp = properties.warpSize;
  profile.multiprocessors = properties.multiProcessorCount;
  profile.max_block_threads = properties.maxThreadsPerBlock;
  profile.registers_per_multiprocessor = properties.regsPerBlock;
  profile.shared_per_block = profile.shared_per_block_optin = int(properties.sharedMemPerBlock);
  profile.shared_per_multiprocessor = int(properties.maxSharedMemoryPerMultiProcessor);
  profile.l2_bytes = properties.l2CacheSize;
  profile.memory_bytes = int64_t(properties.totalGlobalMem);
  launch::derive_features(profile);
  return profile;
}
inline int current_device() {
  int device = 0;
  check(hipGetDevice(&device), "asking for the current device");
  return device;
}
inline void clear_last_error() { static_cast<void>(hipGetLastError()); }
inline int pending_error() { return hipFree(nullptr); }
inline const char* error_text(int code) { return hipGetErrorString(hipError_t(code)); }
inline bool is_missing_code(int code) { return code == hipErrorNoBinaryForGpu || code == hipErrorInvalidDeviceFunction; }
inline std::string architecture(const launch::DeviceProfile& device) { return architecture_text(device); }
inline std::string built_for() { return LIGER_EXT_GPU_ARCHS; }
inline std::string rebuild_hint(const launch::DeviceProfile& device) {
  return text("LIGER_EXT_HIP_ARCHS=", architecture(device), " in the environment: pip install --no-build-isolation .");
}
// Allocates pinned host memory that all devices can write. The relaxed mode permits this while a stream is captured.
inline void allocate_mapped(size_t bytes, void** host, void** device) {
  hipStreamCaptureMode mode = hipStreamCaptureModeRelaxed;
  check(hipThreadExchangeStreamCaptureMode(&mode), "allocating the record of bad targets");
  const hipError_t allocated = hipHostMalloc(host, bytes, hipHostMallocMapped | hipHostMallocPortable);
  const hipError_t mapped = allocated == hipSuccess ? hipHostGetDevicePointer(device, *host, 0) : allocated;
  static_cast<void>(hipThreadExchangeStreamCaptureMode(&mode));
  check(mapped, "allocating the record of bad targets");
}

#elif defined(__CUDACC__)

inline void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw_launch_error(code, what);
}
inline void clear_last_error() { cudaGetLastError(); }
// Returns the error that an earlier call has left: a call that does nothing returns it.
inline int pending_error() { return cudaFree(nullptr); }
inline bool is_missing_code(int code) {
  return code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidDeviceFunction || code == cudaErrorUnsupportedPtxVersion;
}
// An empty kernel, for counting how many clusters with a given shared memory are resident.
struct Idle {
  struct Args {};
  static constexpr int max_threads = 32;
  static LIGER_DEVICE void run(const Args&) {}
};
// Makes a device the current one during the lifetime of this object.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "asking for the current device");
    if (before_ != device) check(cudaSetDevice(device), "reading a device's properties");
  }
  CurrentDevice(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};
// Stores the features and the numbers of resident clusters. The runtime returns both for the current device, which may be another one when
// a profile is requested.
inline void count_clusters(launch::DeviceProfile& profile, int device) {
  const CurrentDevice current(device);
  const void* function = reinterpret_cast<const void*>(&entry<Idle>);
  // Features depend on the code that runs on this device, which may be PTX for older ones. Errors other than missing code are thrown: a
  // profile computed after an error of this one call would be cached.
  cudaFuncAttributes attributes;
  if (const int code = cudaFuncGetAttributes(&attributes, function)) {
    if (!is_missing_code(code)) throw_launch_error(code, "asking for the code of a kernel");
    return clear_last_error();  // the first launch reports the missing code
  }
  profile.bulk_copies = attributes.ptxVersion >= 90;
  profile.async_copies = attributes.ptxVersion >= 80 && !profile.bulk_copies;
  if (!profile.bulk_copies) return;
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, profile.shared_per_block_optin),
        "setting shared memory");
  for (int blocks = 1; blocks <= 3; ++blocks)
    for (int i = 0; i < 4; ++i) {
      const int shared = std::min(profile.shared_per_block_optin, profile.shared_per_multiprocessor / blocks - 1024);
      cudaLaunchConfig_t config{dim3(1 << i), dim3(32), size_t(shared)};
      cudaLaunchAttribute cluster = cluster_attribute(1 << i);
      config.attrs = &cluster;
      config.numAttrs = 1;
      int count = 0;
      const bool failed = cudaOccupancyMaxActiveClusters(&count, function, &config) != cudaSuccess;
      if (failed) clear_last_error();
      // Clusters that cannot be counted are not used: plans without them are slower, but right. The count for several blocks per
      // multiprocessor is at least the count for one block less.
      const int least = blocks > 1 ? profile.resident_clusters[blocks - 2][i] : 0;
      profile.resident_clusters[blocks - 1][i] = failed ? least : std::max(least, count);
    }
}
inline launch::DeviceProfile read_profile(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "reading a device's properties");
  launch::DeviceProfile profile;
  std::strncpy(profile.name, properties.name, sizeof(profile.name) - 1);
  profile.vendor = launch::Vendor::nvidia;
  profile.arch = 10 * properties.major + properties.minor;
  profile.warp = properties.warpSize;
  profile.multiprocessors = properties.multiProcessorCount;
  profile.max_block_threads = properties.maxThreadsPerBlock;
  profile.registers_per_multiprocessor = properties.regsPerMultiprocessor;
  profile.shared_per_block = int(properties.sharedMemPerBlock);
  profile.shared_per_block_optin = int(properties.sharedMemPerBlockOptin);
  profile.shared_per_multiprocessor = int(properties.sharedMemPerMultiprocessor);
  profile.l2_bytes = properties.l2CacheSize;
  profile.memory_bytes = int64_t(properties.totalGlobalMem);
  launch::derive_features(profile);
  count_clusters(profile, device);
  return profile;
}
inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  return device;
}
inline const char* error_text(int code) { return cudaGetErrorString(cudaError_t(code)); }
inline std::string dotted(int arch) { return text(arch / 10, ".", arch % 10); }
inline std::string architecture(const launch::DeviceProfile& device) { return "compute capability " + architecture_text(device); }
inline std::string built_for() {
  std::string all;
  for (const int arch : {__CUDA_ARCH_LIST__}) all += (all.empty() ? "" : ", ") + dotted(arch / 10);
  return all;
}
inline std::string rebuild_hint(const launch::DeviceProfile& device) {
  return text("LIGER_EXT_CUDA_ARCHS=", architecture_text(device), " in the environment: pip install --no-build-isolation .");
}
// Allocates pinned host memory that all devices can write. The relaxed mode permits this while a stream is captured.
inline void allocate_mapped(size_t bytes, void** host, void** device) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "allocating the record of bad targets");
  const cudaError_t allocated = cudaHostAlloc(host, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  const cudaError_t mapped = allocated == cudaSuccess ? cudaHostGetDevicePointer(device, *host, 0) : allocated;
  cudaThreadExchangeStreamCaptureMode(&mode);
  check(mapped, "allocating the record of bad targets");
}

#else  // the host target, where no launch returns a code

inline launch::DeviceProfile read_profile(int) { return simt::profile(); }
inline int current_device() { return 0; }
inline void clear_last_error() {}
inline int pending_error() { return 0; }
inline const char* error_text(int) { return "an error"; }
inline bool is_missing_code(int) { return false; }
inline std::string architecture(const launch::DeviceProfile& device) { return device.name; }
inline std::string built_for() { return "the host"; }
inline std::string rebuild_hint(const launch::DeviceProfile&) { return "make test"; }
inline void allocate_mapped(size_t bytes, void** host, void** device) {
  *host = *device = std::calloc(1, bytes);
  simt::exclude_from_checks(*host, bytes);
}

#endif

}  // namespace liger::gpu::runtime
