// Reference profiles: GPUs that plans are made, shown and tested for on machines that do not have them.
#pragma once
#include <string_view>
#include <vector>

#include "launch/profile.h"

namespace liger::launch {

// By age within a vendor; sources of the figures are in profiles.cpp.
const std::vector<DeviceProfile>& reference_profiles();

// The one of this name, whatever its case, spaces and dashes ("RTX 3070", "rtx3070"); std::invalid_argument lists the names there are.
const DeviceProfile& reference_profile(std::string_view name);

}  // namespace liger::launch
