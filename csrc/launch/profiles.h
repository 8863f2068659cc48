// Reference profiles: profiles of common GPUs, for which plans are computed, shown and tested on machines without these GPUs.
#pragma once
#include <string_view>
#include <vector>

#include "launch/profile.h"

namespace liger::launch {

// All profiles, ordered by vendor and roughly by age within a vendor. profiles.cpp names the sources of the figures.
const std::vector<DeviceProfile>& reference_profiles();

// The profile of this name, regardless of case, spaces and dashes ("RTX 3070", "rtx3070"). Throws std::invalid_argument, which lists the
// known names, if there is none.
const DeviceProfile& reference_profile(std::string_view name);

}  // namespace liger::launch
