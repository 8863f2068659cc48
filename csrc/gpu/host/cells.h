// The access history of memory (a Cell for each two bytes), for the checks in memory.cpp and transfers.cpp, and the functions that
// determine whether two accesses are ordered.
//
// Thread numbers run through the blocks of a cluster: the numbers of block b begin at b * most_threads. Warps are numbered likewise, so a
// block barrier in a cluster is a barrier of a group of warps. Blocks outside of clusters run one at a time.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "gpu/host/simt.h"
#include "kernels/errors.h"

namespace liger::gpu::simt::memory {

constexpr int most_warps = most_blocks * most_threads / 32;

// Time is one counter: every block start and every barrier is a tick, so that the ticks of two accesses show their order.
inline uint32_t now = 1, launch_start = 1, block_start = 1, block_tick = 1;
inline uint32_t warp_ticks[most_warps];
inline int running = -1, warp_size = 32;  // running: the running thread, or -1
// The last group barrier of each warp, and the warps that took part in it.
struct Group {
  uint32_t tick = 0;
  int first = 0, end = 0;
  bool holds(int first_warp, int last_warp) const { return first <= first_warp && last_warp < end; }
};
inline Group groups[most_warps];

// The history of two bytes: the last write, the last reads, and the first read of the launch. Tick 0: never.
struct Cell {
  uint32_t write_block, write_warp;  // ticks of the last block barrier and warp barrier before the write
  uint32_t read_block, read_warp, first_read;
  uint16_t writer, reader;
  uint8_t first_warp, last_warp;     // warps that have read since the last barrier that ordered the reads
  bool many_lanes;                   // several lanes of a warp have read since its last warp barrier
  uint16_t unfenced;                 // loads that no fence has followed yet (transfers.h)
  uint32_t transfer;                 // the transfer that brings or brought these bytes (transfers.h); 0: a thread stored them
};
constexpr int64_t granule = 2;

struct FreeCells {
  void operator()(Cell* cells) const { std::free(cells); }
};
using Cells = std::unique_ptr<Cell[], FreeCells>;
// calloc: pages that no kernel touches cost nothing.
inline Cells allocate_cells(int64_t bytes) {
  Cells cells(static_cast<Cell*>(std::calloc(static_cast<size_t>(bytes / granule + 2), sizeof(Cell))));
  if (!cells) throw std::bad_alloc();
  return cells;
}

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t at, int64_t size) const { return at >= begin && at + uintptr_t(size) <= end; }
  bool touches(uintptr_t at) const { return at >= begin && at < end; }
};
// The shared memory of each block of the cluster lies in the middle of an arena, so that accesses beside it are recognised.
constexpr int64_t shared_room = 256 << 10, shared_margin = 1 << 20, arena_bytes = shared_margin + shared_room + shared_margin;
alignas(4096) inline unsigned char arenas[most_blocks][arena_bytes];
inline int64_t shared_bytes = 0;
inline int block_index(int thread) { return thread / most_threads; }
inline unsigned char* block_shared_memory(int block) { return arenas[block] + shared_margin; }
// The offset in the shared memory of the running thread's block; negative or large if `at` lies elsewhere.
inline int64_t shared_offset(uintptr_t at) { return int64_t(at - reinterpret_cast<uintptr_t>(block_shared_memory(block_index(running)))); }
inline Cell& shared_cell(int block, int64_t offset) {
  static const Cells cells[most_blocks] = {allocate_cells(shared_room), allocate_cells(shared_room), allocate_cells(shared_room),
                                           allocate_cells(shared_room), allocate_cells(shared_room), allocate_cells(shared_room),
                                           allocate_cells(shared_room), allocate_cells(shared_room)};
  Cell& cell = cells[block][offset / granule];
  if (cell.write_block < block_start) cell = {};  // a cell of an earlier block counts as untouched
  return cell;
}

struct Access {
  uintptr_t at;
  int64_t size;
  bool writes, aligned;
  const void* code;  // the address behind the access
  const char* verb() const { return writes ? "stores" : "loads"; }
};

inline int warp_index(int thread) { return thread / warp_size; }

// Returns the part of a message about an earlier access, at `tick` by `thread`.
inline std::string other(uint32_t tick, int thread, const char* did) {
  if (tick < block_start) return text("another block has ", did, " them in this launch");
  if (thread == running) return text("other threads have ", did, " them with no barrier between");
  return text("thread ", thread % most_threads, block_index(thread) == block_index(running) ? "" : " of another block", " has ", did,
              " them", warp_index(thread) == warp_index(running) ? ", of the same warp," : "", " with no barrier between");
}

// Returns whether an earlier access is not ordered before an access that the running thread makes now.
inline bool is_unordered(uint32_t block, uint32_t warp, int thread) {
  if (block < launch_start) return false;
  if (block < block_start) return true;
  if (block < block_tick || thread == running) return false;
  const int other = warp_index(thread), running_warp = warp_index(running);
  if (other == running_warp) return warp >= warp_ticks[running_warp];
  return !groups[running_warp].holds(other, other) || warp >= groups[running_warp].tick;
}

// Returns whether every read came before a barrier that the running thread has passed.
inline bool reads_are_over(const Cell& cell) {
  const Group& group = groups[warp_index(running)];
  return cell.read_block != block_tick || (group.holds(cell.first_warp, cell.last_warp) && cell.read_warp < group.tick);
}

inline void record_access(Cell& cell, const Access& access) {
  const int warp = warp_index(running);
  const uint32_t warp_tick = warp_ticks[warp];
  if (access.writes) {
    cell.write_block = block_tick;
    cell.write_warp = warp_tick;
    cell.writer = uint16_t(running);
    cell.transfer = 0;
    return;
  }
  if (cell.first_read < launch_start) cell.first_read = block_tick;
  const bool same_interval = !reads_are_over(cell), same_warp = same_interval && warp_index(cell.reader) == warp;
  cell.first_warp = uint8_t(same_interval ? std::min<int>(cell.first_warp, warp) : warp);
  cell.last_warp = uint8_t(same_interval ? std::max<int>(cell.last_warp, warp) : warp);
  cell.many_lanes = same_warp && cell.read_warp == warp_tick && (cell.many_lanes || cell.reader != running);
  cell.read_block = block_tick;
  cell.read_warp = warp_tick;
  cell.reader = uint16_t(running);
}

// Reports a race with earlier accesses. name() returns the text about the accessed memory.
template <class Name> void check_order(const Cell& cell, const Access& access, const Name& name) {
  const auto race = [&](uint32_t tick, int thread, const char* did) {
    report(access.code, text("race: ", access.verb(), " ", access.size, " bytes ", name(), "; ", other(tick, thread, did)));
  };
  if (cell.transfer == 0 && is_unordered(cell.write_block, cell.write_warp, cell.writer)) race(cell.write_block, cell.writer, "written");
  if (!access.writes) return;
  if (cell.first_read >= launch_start && cell.first_read < block_start) race(cell.first_read, cell.reader, "read");
  const bool others =
      !reads_are_over(cell) && (cell.first_warp != cell.last_warp || (cell.many_lanes && warp_index(cell.reader) == warp_index(running) &&
                                                                      cell.read_warp >= warp_ticks[warp_index(running)]));
  if (others || is_unordered(cell.read_block, cell.read_warp, cell.reader)) race(cell.read_block, cell.reader, "read");
}

template <class Name> void check_alignment(const Access& access, const Name& name) {
  const int64_t alignment = access.size % 16 == 0 ? 16 : access.size & -access.size;
  if (access.aligned && access.at % uintptr_t(alignment) != 0)
    report(access.code, text("misaligned: ", access.verb(), " ", access.size, " bytes ", name(), ", which is no multiple of ", alignment));
}

}  // namespace liger::gpu::simt::memory
