// Errors of earlier kernels, which ops/ reports to the user.
#pragma once
#include <string>

#include "kernels/types.h"

namespace liger::LIGER_BACKEND {
// Returns the reason why every call of this process on the current device fails (a kernel that failed earlier), or an empty text.
std::string device_failure();
// Throws the error of a bad target (throw_bad_target) if a kernel, on any device, has recorded one since the last call.
void raise_reported_targets();
}  // namespace liger::LIGER_BACKEND
