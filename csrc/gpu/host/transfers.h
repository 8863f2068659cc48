// What brings data to shared memory behind a thread's back, watched: messages between the blocks of a cluster and bulk copies, both counted
// by mbarriers, and asynchronous copies, which their thread waits for. Found, beside what memory.h lists:
//   unready          a load, or a store, of bytes that are still on their way, or whose arrival the warp has not waited for
//   overwritten      a transfer to bytes that threads load in no order with it; a bulk copy without a fence behind the loads
//   mbarriers        not initialised, or not in a definite order with that; announced twice; more bytes than announced
//   ends             a block that ends with data on its way to it; a message to a block that has ended
// The scheduler (simt.cpp) finds waits that nothing can end.
//
// All data arrives at once when a phase of its mbarrier is complete, that is, as early as it can; that it is not used earlier is told by
// who has waited for what. Messages order memory accesses between blocks: clocks of warps, one number for each other warp, tell which.
#pragma once
#include <cstdint>
#include <string>

namespace liger::gpu::simt::memory {
struct Cell;
}
namespace liger::gpu::simt::transfers {

// From the scheduler.
void begin_blocks(int blocks);  // a block, or all of a cluster
void at_collective(int warp);  // of which all threads have arrived at a shuffle, a barrier or a wait
void at_block_barrier(int first_warp, int end_warp);
// `over` cluster barriers have been passed. Behind one, all blocks may use the mbarriers that were initialised before it.
void at_cluster_barrier(int over);
void check(const uint64_t* mbarrier, const void* code);  // may the running thread wait for its phases? It does, before `code`
bool complete(const uint64_t* mbarrier, int parity);  // may it go on?
void waited(const uint64_t* mbarrier, int warp);  // it goes on
std::string waiting_for(const uint64_t* mbarrier);  // in words
std::string unfinished(int block);  // all of its threads have returned, the running one is one of them; empty: as they should

// From memory.cpp, about two bytes that something has brought or will bring.
const char* unready(const memory::Cell&);  // why the running thread may not touch them yet, or null
void loaded(memory::Cell&);  // by the running thread

}  // namespace liger::gpu::simt::transfers
