// Host-side state of a GPU: its profile, the error that a failed kernel left, and the record of a target that a kernel found out of range.
#pragma once
#include <cstdint>
#include <string>

#include "kernels/types.h"
#include "launch/profile.h"

namespace liger::gpu {

// Reads the device's properties at the first call; later calls return the same object. Thread-safe.
const launch::DeviceProfile& device_profile(int device);

// Returns the text of the error that a failed kernel left on the current device, because of which every later call of this process fails
// there. Empty: there is no error.
std::string device_failure();

// One record per process, in pinned memory that all devices see; the first bad target wins. A kernel claims the record, fills it in and
// publishes it. The host raises the error when it starts a later op. Nothing synchronises.
struct TargetRecord {
  int state;        // 0 empty, 1 claimed, 2 complete
  int device;
  int64_t row, target, vocab;
  char op[40];
};
struct TargetReport {   // the argument with which a kernel reports a bad target; plain data
  TargetRecord* record; // device address
  int device;
  char op[40];
};
// Allocates the record at the first call, also while a graph is captured.
TargetReport target_report(const char* op, int device);

// Returns whether the record is complete: one read of host memory, and none before the first target_report().
bool target_reported();
// If the record is complete, empties it and raises its error (throw_bad_target).
void raise_reported_targets();

}  // namespace liger::gpu
