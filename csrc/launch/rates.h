// How fast a device is: the constants of the fused loss's estimate of time (trace/cost.h).
#pragma once
#include <cstdint>

#include "launch/profile.h"

namespace liger::launch {

struct Rates {
  double matmul_16 = 0, matmul_32 = 0;  // operations per second (two for a multiplication and its addition), of 16-bit and fp32 operands
  double bandwidth = 0;                 // bytes per second
  double launch = 0;                    // seconds that a kernel takes whatever its size
  double fresh = 0;                     // bytes per second of memory that is new from the system; 0: nothing, a GPU's comes from a cache
  bool measured = false;                // on such a device; else from its data sheet
};

// Of a device, or of the nearest one that the table in rates.cpp has: the same vendor, the nearest architecture, scaled by the number of
// multiprocessors. gpu: null for a CPU.
Rates rates_of(const DeviceProfile* gpu);

}  // namespace liger::launch
