// Checks of transfers to shared memory that proceed while threads run: messages between the blocks of a cluster and bulk copies, both
// counted by mbarriers, and asynchronous copies, for which the thread that started them waits. The checks find, beside the list in
// memory.h:
//   unready          a load, or a store, of bytes that are still on their way, or whose arrival the warp has not waited for
//   overwritten      a transfer to bytes that threads load in no order with it; a bulk copy without a fence behind the loads
//   mbarriers        not initialised, or used in no order with the initialisation; announced twice; more bytes than announced
//   ends             a block that ends with data on its way to it; a message to a block that has ended
// The scheduler (simt.cpp) finds waits that never end.
//
// All data of a phase arrives at once, when the phase is complete. The checks find a use that comes too early not from the data, but from a
// record of which warp has waited for which phase. A message may replace an earlier one only if other messages order it behind the loads of
// the earlier one. To test this, each warp has a clock with a number for each warp (a vector clock).
#pragma once
#include <cstdint>
#include <string>

namespace liger::gpu::simt::memory {
struct Cell;
}
namespace liger::gpu::simt::transfers {

// The scheduler calls these.
void begin_blocks(int blocks);  // one block, or all blocks of a cluster
void at_collective(int warp);  // all threads of the warp have arrived at a shuffle, a barrier or a wait
void at_block_barrier(int first_warp, int end_warp);
// `over` cluster barriers have been passed. After each, all blocks may use the mbarriers that were initialised before it.
void at_cluster_barrier(int over);
void check(const uint64_t* mbarrier, const void* code);  // checks a wait of the running thread, before `code`
bool complete(const uint64_t* mbarrier, int parity);  // whether the phase is complete
void waited(const uint64_t* mbarrier, int warp);  // the warp continues after its wait
std::string waiting_for(const uint64_t* mbarrier);  // text for messages
std::string unfinished(int block);  // all of its threads have returned; a finding about this, or empty

// memory.cpp calls these, about two bytes that a transfer has brought or will bring.
const char* unready(const memory::Cell&);  // why the running thread may not touch them yet, or null
void loaded(memory::Cell&);  // the running thread has loaded them

}  // namespace liger::gpu::simt::transfers
