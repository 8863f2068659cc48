// DeviceProfile: what a GPU is, as far as a launch plan needs to know. Plain C++: plans are made and tested on any machine.
#pragma once
#include <cstdint>
#include <string>

namespace liger::launch {

enum class Vendor { nvidia, amd, host };

struct DeviceProfile {
  char name[64] = "";              // as the driver gives it; of a reference profile (profiles.h), its name there
  Vendor vendor = Vendor::nvidia;
  int arch = 0;                   // NVIDIA: 10 * major + minor (90); AMD: the digits of gfxNNN read as hex (0x942)
  int warp = 32;                  // lanes of a warp (wave)
  int multiprocessors = 1;        // SMs; compute units; on RDNA, work-group processors of two compute units, as HIP counts them
  int max_block_threads = 1024;
  int registers_per_multiprocessor = 65536;  // of 32 bits
  int shared_per_block = 49152;   // bytes without opting in
  int shared_per_block_optin = 49152;
  int shared_per_multiprocessor = 65536;
  int64_t l2_bytes = 0;           // as the driver counts: on MI300X and later that of one die
  int64_t memory_bytes = 0;
  bool native_bf16 = true;
  bool bulk_copies = false, async_copies = false;  // to shared memory: of any length (Hopper on); of 16 bytes (Ampere, Ada)
  // How many clusters of 1, 2, 4 and 8 blocks are on the device at a time (second index), if a multiprocessor holds 1, 2 or 3 of the blocks
  // (first index); 0: the device has none of that size. An H100 has 132 multiprocessors, but resident_clusters[0][3], clusters of eight
  // blocks that take a multiprocessor each, is 13 and not 132 / 8: a cluster does not cross the device's groups of multiprocessors.
  int resident_clusters[3][4] = {};
};

// In the words of compilers and users: "9.0" (compute capability), "gfx942".
std::string architecture_text(const DeviceProfile&);
// What follows from vendor and arch alone: native_bf16, bulk_copies, async_copies.
void derive_features(DeviceProfile&);

}  // namespace liger::launch
