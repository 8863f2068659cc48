// Rates of a device: matmul operations per second, bytes of memory per second, and seconds per kernel launch. The fused loss estimates the
// time of a plan from them (trace/cost.h).
#pragma once
#include <cstdint>

#include "launch/profile.h"

namespace liger::launch {

struct Rates {
  double matmul_16 = 0, matmul_32 = 0;  // operations per second (two for a multiplication and its addition), of 16-bit and fp32 operands
  double bandwidth = 0;                 // bytes per second
  double launch = 0;                    // seconds: the fixed cost of a kernel launch
  double fresh = 0;                     // CPU: bytes per second at which the system maps new memory; 0: no cost (torch caches a GPU's)
  bool measured = false;                // true: measured on this model of GPU; false: from its data sheet
};

// Returns the reference GPU that is nearest to `gpu`: of the same vendor, with a name that the GPU's name contains or else the nearest
// architecture, and then the nearest number of multiprocessors.
const DeviceProfile& nearest_reference(const DeviceProfile& gpu);

// Returns the rates of the nearest reference GPU, scaled by the number of multiprocessors. gpu: null for a CPU.
Rates device_rates(const DeviceProfile* gpu);

}  // namespace liger::launch
