// The device profile of the host target, and its settings from environment variables.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpu/host/simt.h"
#include "kernels/errors.h"

namespace liger::gpu::simt {
namespace {

// Returns the number in an environment variable. It must be one of two numbers; the first is the default.
int setting(const char* name, int first, int second) {
  const char* const value = std::getenv(name);
  const std::string wanted = value ? value : std::to_string(first);
  require(wanted == std::to_string(first) || wanted == std::to_string(second), name, " is ", wanted, ", expected ", first, " or ", second);
  return std::stoi(wanted);
}

}  // namespace

int warp_width() {
#if defined(LIGER_HOST_AHEAD)
  static const int width = setting("LIGER_EXT_HOST_WARP", 32, 32);
#else
  static const int width = setting("LIGER_EXT_HOST_WARP", 32, 64);
#endif
  return width;
}

// Few multiprocessors and a small L2, so that small tensors take the paths of large ones: several rows per persistent block, logits that
// are read twice. Shared memory: as on most AMD GPUs (64 KiB) or as on MI355X (160 KiB); with LIGER_HOST_AHEAD as on Hopper, with
// LIGER_HOST_ASYNC as on A100.
launch::DeviceProfile profile() {
  launch::DeviceProfile device;
  std::strcpy(device.name, "host target");
  device.vendor = launch::Vendor::host;
  device.warp = warp_width();
  device.multiprocessors = 4;
#if defined(LIGER_HOST_ASYNC)
  device.shared_per_block_optin = 163 << 10;
  device.shared_per_multiprocessor = 164 << 10;
  device.async_copies = true;
#elif defined(LIGER_HOST_AHEAD)
  device.shared_per_block_optin = 227 << 10;
  device.shared_per_multiprocessor = 228 << 10;
  device.bulk_copies = device.async_copies = true;
  for (int resident = 1; resident <= 3; ++resident)
    for (int i = 0; i < 4; ++i) device.resident_clusters[resident - 1][i] = std::max(1, 4 * resident >> i);
#else
  device.shared_per_block_optin = device.shared_per_multiprocessor = setting("LIGER_EXT_HOST_SHARED", 64, 160) << 10;
#endif
  device.l2_bytes = 64 << 10;
  device.memory_bytes = int64_t{1} << 30;
  return device;
}

}  // namespace liger::gpu::simt
