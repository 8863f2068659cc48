// The reference profiles, and the sources of their figures:
//   CG   CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": warp 32, 1,024 threads a block, 65,536 registers
//        a multiprocessor, 48 KB of shared memory a block without opting in, shared memory a multiprocessor, and the most that a block
//        can have: all of the multiprocessor's on 7.x, 1 KB less from 8.0 on.
//   WP   NVIDIA's whitepapers: Volta (V100), Turing and the T4 datasheet, Ampere GA100 (A100), Ampere GA102 (RTX 3070 in its appendix),
//        Ada (RTX 4090) and the L4 datasheet, Hopper (H100), H200 datasheet, RTX Blackwell (RTX 5090).
//   DQ   Published output of deviceQuery: RTX 5090 (NVIDIA/nccl issue 1637), B200 (pytorch/ao pull request 4002).
//   AS   AMD's "GPU hardware specifications" (rocm.docs.amd.com, reference/gpu-arch-specs): compute units, wavefront, LDS, L2, registers.
//   HI   Values that HIP reports: RX 7900 XT 42 processors of two compute units (ROCm/hip issue 3198), and likewise on all of RDNA;
//        MI300X 4 MB of L2, the L2 of one die (ROCm/ROCm issue 4203).
// Memory sizes are the vendors' figures; a driver reserves a little of the memory.
#include "launch/profiles.h"

#include <cctype>
#include <charconv>
#include <cstring>
#include <stdexcept>

namespace liger::launch {
namespace {

constexpr int64_t KiB = 1 << 10, MiB = 1 << 20, GiB = 1 << 30;

struct Clusters {
  int counts[4] = {};  // clusters of 1, 2, 4 and 8 blocks
};

DeviceProfile named(const char* name, Vendor vendor, int arch, int multiprocessors, int64_t l2, int64_t memory) {
  DeviceProfile profile;
  std::strncpy(profile.name, name, sizeof(profile.name) - 1);
  profile.vendor = vendor;
  profile.arch = arch;
  profile.multiprocessors = multiprocessors;
  profile.l2_bytes = l2;
  profile.memory_bytes = memory;
  derive_features(profile);
  return profile;
}

// Source CG for everything that depends on the compute capability alone.
DeviceProfile nvidia(const char* name, int arch, int multiprocessors, int64_t shared, int64_t l2, int64_t memory, Clusters clusters = {}) {
  DeviceProfile profile = named(name, Vendor::nvidia, arch, multiprocessors, l2, memory);
  profile.shared_per_multiprocessor = int(shared);
  profile.shared_per_block_optin = int(arch < 80 ? shared : shared - KiB);
  for (int blocks = 1; blocks <= 3; ++blocks)  // with n blocks per multiprocessor the device holds at least n times as many clusters
    for (int i = 0; i < 4; ++i) profile.resident_clusters[blocks - 1][i] = blocks * clusters.counts[i];
  return profile;
}

// Source AS. `registers` are the bytes of a register file, four for each register. Before gfx950 a group may have 64 KiB of LDS; HIP has no
// opting in to more.
DeviceProfile amd(const char* name, int arch, int warp, int multiprocessors, int64_t lds, int64_t registers, int64_t l2, int64_t memory) {
  DeviceProfile profile = named(name, Vendor::amd, arch, multiprocessors, l2, memory);
  profile.warp = warp;
  profile.shared_per_block = profile.shared_per_block_optin = profile.shared_per_multiprocessor = int(lds);
  profile.registers_per_multiprocessor = int(registers / 4);
  return profile;
}

// Resident clusters. H200: cudaOccupancyMaxActiveClusters on one H200. The others are lower bounds for every chip of the model. A cluster
// lies in one group of multiprocessors (GPC), and a group consists of pairs of them. The fewest clusters fit if as many groups as possible
// leave a remainder. H100: 132 multiprocessors in 8 groups of at most 18 (WP), at worst 5 of 18 and 3 of 14. RTX 5090: 170 in 11 groups of
// at most 16 (WP), at worst 8 of 16 and 3 of 14. B200: 148 in 8 groups of at most 20 (not confirmed), at worst 6 of 20 and 2 of 14 for
// clusters of 8, and 2 of 20 and 6 of 18 for clusters of 4. Where a driver counts more clusters, grids are larger.
constexpr Clusters h100{{132, 66, 29, 13}}, h200{{132, 66, 32, 15}}, b200{{148, 74, 34, 14}}, rtx5090{{170, 85, 41, 19}};

std::vector<DeviceProfile> all() {
  return {
      nvidia("V100", 70, 80, 96 * KiB, 6 * MiB, 32 * GiB),                                // CG WP; also sold with 16 GB
      nvidia("T4", 75, 40, 64 * KiB, 4 * MiB, 16 * GiB),                                  // CG WP
      nvidia("RTX 3070", 86, 46, 100 * KiB, 4 * MiB, 8 * GiB),                            // CG WP
      nvidia("A100", 80, 108, 164 * KiB, 40 * MiB, 80 * GiB),                             // CG WP; also sold with 40 GB
      nvidia("L4", 89, 58, 100 * KiB, 48 * MiB, 24 * GiB),                                // CG WP
      nvidia("RTX 4090", 89, 128, 100 * KiB, 72 * MiB, 24 * GiB),                         // CG WP
      nvidia("H100", 90, 132, 228 * KiB, 50 * MiB, 80 * GiB, h100),                       // CG WP, the SXM5 board
      nvidia("H200", 90, 132, 228 * KiB, 50 * MiB, 141 * GiB, h200),                      // CG WP; its L2 by the H100's
      nvidia("B200", 100, 148, 228 * KiB, 126 * MiB + 512 * KiB, 178 * GiB, b200),        // CG DQ
      nvidia("RTX 5090", 120, 170, 100 * KiB, 96 * MiB, 32 * GiB, rtx5090),               // CG DQ
      amd("MI250X", 0x90a, 64, 110, 64 * KiB, 512 * KiB, 8 * MiB, 64 * GiB),              // AS, one of its two dies: a device of its own
      amd("MI300X", 0x942, 64, 304, 64 * KiB, 512 * KiB, 4 * MiB, 192 * GiB),             // AS HI
      amd("MI355X", 0x950, 64, 256, 160 * KiB, 512 * KiB, 4 * MiB, 288 * GiB),  // AS; its L2 reported as the MI300X's: not confirmed
      amd("RX 7900 XT", 0x1100, 32, 42, 64 * KiB, 768 * KiB, 6 * MiB, 20 * GiB),  // AS HI; 128 KiB of LDS for two groups
      amd("RX 9070 XT", 0x1201, 32, 32, 64 * KiB, 768 * KiB, 8 * MiB, 16 * GiB),  // AS, 64 compute units; halved as HI, not confirmed
  };
}

std::string plain(std::string_view name) {
  std::string letters;
  for (const unsigned char c : name)
    if (std::isalnum(c)) letters += char(std::tolower(c));
  return letters;
}

}  // namespace

std::string architecture_text(const DeviceProfile& device) {
  char hex[8] = {};
  std::to_chars(hex, hex + sizeof(hex) - 1, device.arch, 16);
  if (device.vendor == Vendor::amd) return std::string("gfx") + hex;
  if (device.vendor == Vendor::nvidia) return std::to_string(device.arch / 10) + "." + std::to_string(device.arch % 10);
  return "host";
}

void derive_features(DeviceProfile& device) {
  const bool nvidia = device.vendor == Vendor::nvidia;
  device.native_bf16 = device.arch >= (nvidia ? 80 : 0x908);
  device.bulk_copies = nvidia && device.arch >= 90;
  device.async_copies = nvidia && device.arch >= 80 && !device.bulk_copies;
}

const std::vector<DeviceProfile>& reference_profiles() {
  static const std::vector<DeviceProfile> profiles = all();
  return profiles;
}

const DeviceProfile& reference_profile(std::string_view name) {
  std::string error = "no reference profile is called '" + std::string(name) + "'; known:";
  const char* separator = " ";
  for (const DeviceProfile& profile : reference_profiles()) {
    if (plain(profile.name) == plain(name)) return profile;
    error += std::string(separator) + profile.name;
    separator = ", ";
  }
  throw std::invalid_argument(error);
}

}  // namespace liger::launch
