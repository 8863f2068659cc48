// DeviceProfile: the properties of a GPU on which launch plans depend. Plain C++, so that plans are computed and tested on any machine.
#pragma once
#include <cstdint>
#include <string>

namespace liger::launch {

enum class Vendor { nvidia, amd, host };

struct DeviceProfile {
  char name[64] = "";              // as the driver reports it; of a reference profile (profiles.h), its name there
  Vendor vendor = Vendor::nvidia;
  int arch = 0;                   // NVIDIA: 10 * major + minor (90); AMD: the digits of gfxNNN read as hex (0x942)
  int warp = 32;                  // lanes of a warp (wave)
  int multiprocessors = 1;        // SMs; compute units; on RDNA, work-group processors of two compute units, as HIP counts them
  int max_block_threads = 1024;
  int registers_per_multiprocessor = 65536;  // of 32 bits
  int shared_per_block = 49152;   // bytes without opting in
  int shared_per_block_optin = 49152;
  int shared_per_multiprocessor = 65536;
  int64_t l2_bytes = 0;           // as the driver counts: on MI300X and later the L2 of one die
  int64_t memory_bytes = 0;
  bool native_bf16 = true;
  bool bulk_copies = false, async_copies = false;  // copies to shared memory: of many bytes (from Hopper on); of 16 bytes (Ampere, Ada)
  // The numbers of clusters of 1, 2, 4 and 8 blocks (second index) that are resident on the device, if a multiprocessor holds 1, 2 or 3 of
  // the blocks (first index); 0: the device has no clusters of that size. On an H100, which has 132 multiprocessors,
  // resident_clusters[0][3] is 13 and not 132 / 8: a cluster lies within one group of multiprocessors (GPC), and each of its eight blocks
  // has a multiprocessor to itself.
  int resident_clusters[3][4] = {};
};

// The architecture as compilers and users write it: "9.0" (compute capability), "gfx942".
std::string architecture_text(const DeviceProfile&);
// Sets the fields that follow from vendor and arch alone: native_bf16, bulk_copies, async_copies.
void derive_features(DeviceProfile&);

}  // namespace liger::launch
