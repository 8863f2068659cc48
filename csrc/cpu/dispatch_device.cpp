// The functions of kernels/device.h for the CPU library and the host target. There ops throw every error at once, also a bad target's, so
// these functions have no error to report.
#include "kernels/device.h"

namespace liger::cpu {

std::string device_failure() { return {}; }
void raise_reported_targets() {}

}  // namespace liger::cpu
