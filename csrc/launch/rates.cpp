// The table of rates (rates.h) of the reference GPUs: operations per second of matmuls (dense, with fp32 sums) and bytes per second of
// memory, from the GPUs' data sheets. The operations per second are multiplied by 0.875, the part of the data sheet's number that an H100
// 80 GB (SXM5) reached under its power limit (docs/measurements.md). No other GPU's rates were measured. The rates of a CPU are those of
// two server cores.
#include "launch/rates.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "launch/profiles.h"

namespace liger::launch {
namespace {

struct Sheet {
  const char* name;  // of a reference profile
  double tera_16, tera_32, tera_bytes;
};
constexpr Sheet sheets[] = {
    {"V100", 125, 15.7, 0.9}, {"T4", 65, 8.1, 0.32},          {"RTX 3070", 40.6, 20.3, 0.448}, {"A100", 312, 19.5, 2.04},
    {"L4", 121, 30.3, 0.3},   {"RTX 4090", 165, 82.6, 1.01},  {"H100", 989, 67, 3.35},         {"H200", 989, 67, 4.8},
    {"B200", 2250, 75, 8},    {"RTX 5090", 209, 105, 1.79},   {"MI250X", 191, 24, 1.6},        {"MI300X", 1307, 163, 5.3},
    {"MI355X", 2500, 157, 8}, {"RX 7900 XT", 103, 51.5, 0.8}, {"RX 9070 XT", 195, 48.7, 0.64},
};
constexpr double reached = 0.875, launch_seconds = 4e-6;

// The distance between two GPUs of one vendor: by architecture, then by size.
int64_t distance(const DeviceProfile& a, const DeviceProfile& b) {
  return std::abs(int64_t{a.arch} - b.arch) * 10000 + std::abs(a.multiprocessors - b.multiprocessors) + (a.memory_bytes < b.memory_bytes);
}

}  // namespace

const DeviceProfile& nearest_reference(const DeviceProfile& gpu) {
  const DeviceProfile* nearest = nullptr;
  for (const DeviceProfile& known : reference_profiles()) {
    if (known.vendor != gpu.vendor) continue;
    const bool same = std::strstr(gpu.name, known.name) != nullptr, found = nearest && std::strstr(gpu.name, nearest->name);
    if (!nearest || (same && !found) || (same == found && distance(known, gpu) < distance(*nearest, gpu))) nearest = &known;
  }
  if (nearest == nullptr) throw std::invalid_argument("nearest_reference: no reference GPU is of this vendor");
  return *nearest;
}

Rates device_rates(const DeviceProfile* gpu) {
  if (gpu == nullptr || gpu->vendor == Vendor::host) return {1.5e11, 1.5e11, 2e10, 2e-6, 4e9, false};
  const DeviceProfile& nearest = nearest_reference(*gpu);
  for (const Sheet& sheet : sheets) {
    if (std::strcmp(sheet.name, nearest.name) != 0) continue;
    const double size = double(gpu->multiprocessors) / nearest.multiprocessors;
    const bool measured = std::strcmp(sheet.name, "H100") == 0 && gpu->multiprocessors == nearest.multiprocessors;
    return {sheet.tera_16 * 1e12 * reached * size,
            sheet.tera_32 * 1e12 * reached * size,
            sheet.tera_bytes * 1e12 * size,
            launch_seconds,
            0,
            measured};
  }
  return {};
}

}  // namespace liger::launch
