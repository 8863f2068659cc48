// For the CPU library and the host target: a CPU fails at once, and its kernels raise what is wrong with a target themselves.
#include "kernels/device.h"

namespace liger::cpu {

std::string device_failure() { return {}; }
void raise_reported_targets() {}

}  // namespace liger::cpu
