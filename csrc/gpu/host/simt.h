// Runs a kernel on the CPU as a GPU would: block after block, or cluster after cluster, their threads as fibres in lockstep warps. A
// thread runs alone until its next collective (shuffle, barrier, wait) or its end; there the whole warp, or block, must arrive at the
// same one.
// What a GPU would leave undefined is an error here, and names kernel, block and thread:
//   divergence      threads of a warp at different collectives, of a block at different barriers, or returned before one
//   deadlocks       waits for what never comes
//   shuffles        a partner outside the warp
//   launches        more threads than the kernel was compiled for, part of a warp, more shared memory than the device has
//   declarations    rows x columns of a launch (launch/launch.h) that are not what its threads have touched
//   memory          see gpu/host/memory.h, and of copies and messages transfers.h
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <typeinfo>

#include "launch/launch.h"

namespace liger::gpu::simt {

constexpr int most_threads = 1024, most_blocks = 8;  // of a block, of a cluster

// Where the running thread is.
struct Place {
  int thread, block_threads, rank, cluster;  // rank: of its block in the cluster
  int64_t block, grid;
};
Place place();
unsigned char* shared_memory();

// Lanes of a warp, and the device that launch plans are made for: LIGER_EXT_HOST_WARP=32 (the default) or 64 in the environment, and KiB of
// shared memory: LIGER_EXT_HOST_SHARED=64 (the default) or 160; 227 in the library with clusters and bulk copies (LIGER_HOST_AHEAD).
int warp_width();
launch::DeviceProfile profile();

void block_barrier(const std::source_location&);
// Of the threads group * threads and following ones: whole warps, as many as `threads`.
void group_barrier(int group, int threads, const std::source_location&);
void warp_barrier(const std::source_location&);
uint32_t shuffle_xor(uint32_t bits, int mask, const std::source_location&);
int atomic_claim(int* flag);

// As in platform_cuda.h; transfers.h says what is watched.
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

// Kernels that a library can launch are known when it is loaded, so that a test can ask for those that have not run.
int know(const char* name);
template <class K> struct Known {
  static inline const int index = know(typeid(K).name());
};

struct Kernel {
  int known;   // index
  int max_threads;
  void (*run)(const void* args);
  const void* args;
  size_t args_bytes;
};
// Throws std::runtime_error at the first finding.
void run(const Kernel&, const launch::Launch&);

// The running thread, which does not come back, did what `finding` says, by the instruction before `code`.
[[noreturn]] void report(const void* code, const std::string& finding);

}  // namespace liger::gpu::simt
