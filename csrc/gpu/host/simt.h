// Runs kernels on the CPU as a GPU would: block after block, or cluster after cluster, with threads as fibres in lockstep warps. A thread
// runs alone until its next collective (shuffle, barrier, wait) or its end; there all threads of the warp, group or block must arrive at
// the same collective. Behaviour that a GPU leaves undefined is an error here, and the message names kernel, block and thread:
//   divergence      threads of a warp at different collectives; threads of a block at different barriers, or returned before a barrier
//   deadlocks       waits that never end
//   shuffles        a partner outside the warp
//   launches        more threads than the kernel was compiled for, part of a warp, more shared memory than the device has
//   declarations    threads that have touched another number of elements than the rows x columns of the launch (launch/launch.h)
//   memory          see gpu/host/memory.h; for copies and messages, transfers.h
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <typeinfo>

#include "launch/launch.h"

namespace liger::gpu::simt {

constexpr int most_threads = 1024, most_blocks = 8;  // of a block, of a cluster

// The position of the running thread.
struct Place {
  int thread, block_threads, rank, cluster;  // rank: of its block in the cluster
  int64_t block, grid;
};
Place place();
unsigned char* shared_memory();

// The lanes of a warp, and the profile of the device that launches are planned for. The environment variables LIGER_EXT_HOST_WARP=32 (the
// default) or 64 and LIGER_EXT_HOST_SHARED=64 (the default) or 160 set the lanes and the KiB of shared memory. The library with clusters
// and bulk copies (LIGER_HOST_AHEAD) has 32 lanes and 227 KiB; with LIGER_HOST_ASYNC in addition, 163 KiB.
int warp_width();
launch::DeviceProfile profile();

void block_barrier(const std::source_location&);
// A barrier of `threads` threads from thread group * threads on, which are whole warps.
void group_barrier(int group, int threads, const std::source_location&);
void warp_barrier(const std::source_location&);
uint32_t shuffle_xor(uint32_t bits, int mask, const std::source_location&);
int atomic_claim(int* flag);

// As in platform_cuda.h; transfers.h lists the checks.
void cluster_arrive();
void cluster_wait(const std::source_location&);
void init_mbarrier(uint64_t*);
void expect_bytes(uint64_t*, int bytes);
void wait_for_phase(uint64_t*, int parity, const std::source_location&);
void send(float* to, uint64_t*, int rank, float value);
void bulk_copy(void* to, const void* from, int bytes, uint64_t*);
void finish_reads_before_copies();
void async_copy(void* to, const void* from);
void close_copies();
void wait_for_copies(int left);

// Registers a kernel when the library is loaded, so that a test can find kernels that have not run. Returns its index.
int register_kernel(const char* name);
template <class K> struct Registered {
  static inline const int index = register_kernel(typeid(K).name());
};

struct Kernel {
  int index;   // its index from register_kernel()
  int max_threads;
  void (*run)(const void* args);
  const void* args;
  size_t args_bytes;
};
// Runs a launch. Throws std::runtime_error at the first finding.
void run(const Kernel&, const launch::Launch&);

// Ends the running thread and the launch with `finding`, an error of the instruction before `code`.
[[noreturn]] void report(const void* code, const std::string& finding);

}  // namespace liger::gpu::simt
