// DeviceProfile: what a GPU is, as far as a launch plan needs to know. Plain C++: plans are made and tested on any machine.
#pragma once
#include <cstdint>

namespace liger::launch {

enum class Vendor { nvidia, amd, host };

struct DeviceProfile {
  char name[64] = "";
  Vendor vendor = Vendor::nvidia;
  int arch = 0;                   // NVIDIA: 10 * major + minor (90); AMD: the digits of gfxNNN read as hex (0x942)
  int warp = 32;                  // lanes of a warp (wave)
  int multiprocessors = 1;        // SMs, compute units
  int max_block_threads = 1024;
  int registers_per_multiprocessor = 65536;
  int shared_per_block = 49152;   // bytes without opting in
  int shared_per_block_optin = 49152;
  int shared_per_multiprocessor = 65536;
  int64_t l2_bytes = 0, memory_bytes = 0;
  bool native_bf16 = true, bulk_copies = false;
  // Clusters of 1, 2, 4 and 8 blocks that are on the device at a time, if a multiprocessor holds 1, 2 or 3 of the blocks; 0: none of
  // that size. Fewer than multiprocessors / size, since a cluster does not cross the device's groups of multiprocessors.
  int resident_clusters[3][4] = {};
};

}  // namespace liger::launch
