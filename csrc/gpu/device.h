// The running device: its profile, and the record of targets that a kernel found out of range.
#pragma once
#include <cstdint>
#include <string>

#include "kernels/types.h"
#include "launch/profile.h"

namespace liger::gpu {

// Read once per device; safe from any thread.
const launch::DeviceProfile& device_profile(int device);

// What keeps every call of this process on the current device from working (a kernel that failed earlier); empty: nothing.
std::string device_failure();

// One record per process in pinned memory that all devices see; the first bad target wins. A kernel claims it, fills it in and
// publishes it; the host raises it at the next eager call. Nothing synchronises.
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
// Makes the record at the first call, also while a graph is captured.
TargetReport target_report(const char* op, int device);

// Is there a complete record? One read of host memory, none before the first target_report().
bool target_reported();
// Empties it and raises its error (throw_bad_target), if there is one.
void raise_reported_targets();

}  // namespace liger::gpu
