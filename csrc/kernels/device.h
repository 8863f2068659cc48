// What ops/ asks of the device that its backend is for, beside kernels.
#pragma once
#include <string>

#include "kernels/types.h"

namespace liger::LIGER_BACKEND {
// What keeps every call of this process on the current device from working (a kernel that failed earlier); empty: nothing.
std::string device_failure();
// Raises the error of a bad target (throw_bad_target) that a kernel has found since the last call, if there is one.
void raise_reported_targets();
}  // namespace liger::LIGER_BACKEND
