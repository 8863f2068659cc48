// The running device: its profile, and the record of targets that a kernel found out of range.
#pragma once
#include <cstdint>

#include "kernels/types.h"
#include "launch/profile.h"

namespace liger::gpu {

// Read once per device.
const launch::DeviceProfile& device_profile(int device);

// One record per process in pinned memory that all devices see; the first bad target wins. Kernels claim it, the host raises
// it at the next eager call: nothing synchronises.
struct TargetRecord {
  int state;        // 0 empty, 1 claimed, 2 complete
  int device;
  int64_t row, target, vocab;
  char op[40];
};
struct TargetReport {   // what a kernel needs to report; plain data inside its arguments
  TargetRecord* record; // device address
  int device;
  char op[40];
};
TargetReport target_report(const char* op, int device);

// Raises std::out_of_range when a record is complete, and empties it. Cheap: one read of host memory.
void raise_reported_targets();

}  // namespace liger::gpu
