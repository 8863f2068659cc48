#include "launch/launch.h"

namespace liger::launch {

void check_threads(const DeviceProfile& device, const LaunchPlan& plan) {
  if (device.vendor == Vendor::amd && int64_t{plan.grid} * plan.block >= int64_t{1} << 32)
    throw std::length_error("a tensor needs more threads than one launch can have on " + std::string(device.name));
}

}  // namespace liger::launch
