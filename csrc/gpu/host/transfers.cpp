#include "gpu/host/transfers.h"

#include <cstring>
#include <utility>
#include <vector>

#include "gpu/host/cells.h"
#include "gpu/host/memory.h"

namespace liger::gpu::simt {
namespace {

using namespace memory;

struct Copy {
  unsigned char* to;
  std::vector<unsigned char> data;
};
using Clock = std::vector<uint32_t>;  // of a warp: for each warp, the number of its last collective that is over

void join(Clock& into, const Clock& other) {
  for (size_t w = 0; w < into.size(); ++w) into[w] = std::max(into[w], other[w]);
}

struct Mbarrier {
  const uint64_t* at;
  int block, opener;               // the block that has it; the thread that initialised it
  uint32_t block_tick, warp_tick;  // at the initialisation
  int cluster_barriers;            // passed before the initialisation
  int phase = 0;                   // the phase that is not complete yet
  bool announced = false;
  int64_t expected = 0, arrived = 0;  // bytes of this phase
  int last_phase = -1;             // the last phase that brought bytes
  uint32_t transfer = 0;           // the transfer of this phase's data; 0: no data yet
  std::vector<Copy> copies;        // of this phase
  Clock sent, complete, loads;     // of the senders so far; of the senders of complete phases; each warp's last load of a message
  std::vector<int> waited;         // by warp: the phases that it has waited for
};

// A transfer: the data of a phase of an mbarrier (its number in `mbarriers`), or the asynchronous copies of threads.
struct Transfer {
  int mbarrier = -1, phase = 0;
  bool is_message = false, has_arrived = false;
};
constexpr uint32_t asynchronous = 1;  // the number of the transfer of all asynchronous copies

std::vector<Mbarrier> mbarriers;
std::vector<Transfer> transfers_by_number;  // transfers by number; 0: none
std::vector<Clock> clocks;    // of warps
std::vector<char> ended;      // blocks
int cluster_barriers = 0;

// By thread: the cells that it has loaded since its last fence, and its groups of asynchronous copies; the last group is open.
std::vector<Cell*> unfenced[most_blocks * most_threads];
std::vector<std::vector<Copy>> copy_groups[most_blocks * most_threads];

std::string place_text(const void* at) {
  const int64_t offset = shared_offset(reinterpret_cast<uintptr_t>(at));
  if (offset < 0 || offset >= shared_room) return "of another block";
  return text("at shared memory + ", offset);
}

int find(const uint64_t* at) {
  for (size_t i = 0; i < mbarriers.size(); ++i)
    if (mbarriers[i].at == at) return int(i);
  return -1;
}

// Returns the number of an mbarrier that the running thread uses, by the instruction before `code`, after checks of its initialisation.
int used(const uint64_t* at, const void* code) {
  const int found = find(at);
  if (found < 0) report(code, "mbarrier: the one " + place_text(at) + " is not initialised");
  const Mbarrier& m = mbarriers[found];
  const bool ordered = !is_unordered(m.block_tick, m.warp_tick, m.opener) && m.block == block_index(running);
  if (!ordered && cluster_barriers <= m.cluster_barriers)
    report(code,
           text("mbarrier: the one ", place_text(at), " was initialised by thread ", m.opener % most_threads, " with no barrier between"));
  return found;
}

// Ends the phase if it is announced and all of its bytes have come.
void end_phase(Mbarrier& m) {
  if (!m.announced || m.arrived != m.expected) return;
  for (const Copy& copy : m.copies) std::memcpy(copy.to, copy.data.data(), copy.data.size());
  m.copies.clear();
  if (m.transfer) transfers_by_number[m.transfer].has_arrived = true;
  if (m.arrived > 0) m.last_phase = m.phase;
  join(m.complete, m.sent);
  ++m.phase;
  m.announced = false;
  m.expected = m.arrived = 0;
  m.transfer = 0;
}

// Marks `bytes` of a block's shared memory as brought by transfer number `transfer`, and checks that they may be overwritten. Barriers of
// threads do not order messages; bring() checks these.
void reserve(int block, const void* to, int64_t bytes, uint32_t transfer, const void* code) {
  const bool is_message = transfers_by_number[transfer].is_message;
  const int64_t offset = static_cast<const unsigned char*>(to) - block_shared_memory(block);
  const auto name = [&] { return text("at shared memory + ", offset, block == block_index(running) ? "" : " of another block"); };
  const auto stores = [&] { return text("a ", is_message ? "message" : "copy", " stores ", bytes, " bytes ", name()); };
  if (offset < 0 || offset + bytes > shared_bytes)
    report(code, text("out of bounds: ", stores(), "; the launch asked for ", shared_bytes, " bytes"));
  const Access access{reinterpret_cast<uintptr_t>(to), bytes, true, true, code};
  check_alignment(access, name);
  for (int64_t at = offset; at < offset + bytes; at += granule) {
    Cell& cell = shared_cell(block, at);
    if (const char* const finding = cell.transfer && !is_message ? transfers::unready(cell) : nullptr)
      report(code, text("overwritten: ", stores(), ", ", finding));
    if (cell.unfenced > 0) report(code, text("overwritten: ", stores(), ", which threads have loaded without a fence behind it"));
    if (!is_message) check_order(cell, access, name);
    record_access(cell, access);
    cell.transfer = transfer;
  }
}
// Sends `bytes` on their way to shared memory of `block`; mbarrier number `mbarrier_number` counts them.
void bring(int mbarrier_number, bool is_message, int block, unsigned char* to, const void* from, int64_t bytes, const void* code) {
  Mbarrier& m = mbarriers[mbarrier_number];
  if (ended[block]) report(code, text("ends: a message to a block of the cluster whose threads have returned"));
  if (m.transfer == 0) {
    m.transfer = uint32_t(transfers_by_number.size());
    transfers_by_number.push_back({mbarrier_number, m.phase, is_message, false});
  }
  for (size_t w = 0; is_message && w < m.loads.size(); ++w)
    if (m.loads[w] > clocks[warp_index(running)][w])
      report(code, text("overwritten: a message stores ", bytes, " bytes, while warp ", w % (most_threads / warp_size),
                        " of that block may still load the one before"));
  reserve(block, to, bytes, m.transfer, code);
  m.copies.push_back({to, {static_cast<const unsigned char*>(from), static_cast<const unsigned char*>(from) + bytes}});
  m.arrived += bytes;
  if (m.announced && m.arrived > m.expected)
    report(code, text("mbarrier: ", m.arrived, " bytes come to the one at shared memory + ",
                      reinterpret_cast<const unsigned char*>(m.at) - block_shared_memory(m.block), ", ", m.expected, " are announced"));
}

}  // namespace

namespace transfers {

void begin_blocks(int blocks) {
  mbarriers.clear();
  transfers_by_number.assign(2, {});
  ended.assign(most_blocks, false);
  cluster_barriers = 0;
  clocks.clear();
  for (int t = 0; t < blocks * most_threads; ++t) unfenced[t].clear(), copy_groups[t].clear();
}
void at_collective(int warp) {
  if (!clocks.empty()) ++clocks[warp][warp];
}
void at_block_barrier(int first_warp, int end_warp) {
  if (clocks.empty()) return;
  for (int w = first_warp + 1; w < end_warp; ++w) join(clocks[first_warp], clocks[w]);
  for (int w = first_warp + 1; w < end_warp; ++w) join(clocks[w], clocks[first_warp]);
  for (Mbarrier& m : mbarriers) {
    const auto first = m.waited.begin() + first_warp, end = m.waited.begin() + end_warp;
    std::fill(first, end, *std::max_element(first, end));
  }
}
void at_cluster_barrier(int over) { cluster_barriers = over; }

void check(const uint64_t* at, const void* code) { used(at, code); }
bool complete(const uint64_t* at, int parity) { return (mbarriers[find(at)].phase & 1) != parity; }
void waited(const uint64_t* at, int warp) {
  Mbarrier& m = mbarriers[find(at)];
  m.waited[warp] = m.phase;
  join(clocks[warp], m.complete);
}
std::string waiting_for(const uint64_t* at) {
  const Mbarrier& m = mbarriers[find(at)];
  const std::string one = "waits for a phase of the mbarrier " + place_text(at);
  return m.announced ? text(one, ", of whose ", m.expected, " bytes ", m.arrived, " have come") : one + ", which nobody has announced";
}

std::string unfinished(int block) {
  ended[block] = true;
  for (const Mbarrier& m : mbarriers) {
    if (m.block != block) continue;
    const int most = *std::max_element(m.waited.begin(), m.waited.end());
    if (m.arrived > 0 || m.last_phase >= most)
      return text("ends: a thread has returned before the block has waited for what comes to its mbarrier ", place_text(m.at));
  }
  for (int t = block * most_threads; t < (block + 1) * most_threads; ++t)
    for (const auto& group : copy_groups[t])
      if (!group.empty()) return text("ends: thread ", t % most_threads, " has returned before it has waited for its asynchronous copies");
  return {};
}

const char* unready(const Cell& cell) {
  const Transfer& t = transfers_by_number[cell.transfer];
  if (!t.has_arrived) return "which a transfer may still be bringing";
  if (mbarriers[t.mbarrier].waited[warp_index(running)] <= t.phase) return "which a transfer has brought that this warp has not waited for";
  return nullptr;
}
void loaded(Cell& cell) {
  const Transfer& t = transfers_by_number[cell.transfer];
  if (t.is_message) {
    const int warp = warp_index(running);
    mbarriers[t.mbarrier].loads[warp] = clocks[warp][warp];
  } else {
    ++cell.unfenced;
    unfenced[running].push_back(&cell);
  }
}

}  // namespace transfers

// The functions that kernels call (simt.h).
void init_mbarrier(uint64_t* at) {
  const void* const code = __builtin_return_address(0);
  if (clocks.empty()) clocks.assign(most_warps, Clock(most_warps));
  const int64_t offset = shared_offset(reinterpret_cast<uintptr_t>(at));
  if (offset < 0 || offset + 8 > shared_bytes || offset % 8 != 0)
    report(code, text("out of bounds: an mbarrier ", place_text(at), "; the launch asked for ", shared_bytes, " bytes"));
  const Access access{reinterpret_cast<uintptr_t>(at), 8, true, true, code};
  const auto name = [&] { return place_text(at); };
  for (int i = 0; i < 8; i += granule) {
    Cell& cell = shared_cell(block_index(running), offset + i);
    check_order(cell, access, name);
    record_access(cell, access);
  }
  if (find(at) >= 0) report(code, "mbarrier: the one " + place_text(at) + " is initialised twice");
  Mbarrier m;
  m.at = at;
  m.block = block_index(running), m.opener = running;
  m.block_tick = block_tick, m.warp_tick = warp_ticks[warp_index(running)], m.cluster_barriers = cluster_barriers;
  m.sent = m.complete = m.loads = Clock(most_warps);
  m.waited.assign(most_warps, 0);
  mbarriers.push_back(std::move(m));
}
void expect_bytes(uint64_t* at, int bytes) {
  const void* const code = __builtin_return_address(0);
  Mbarrier& m = mbarriers[used(at, code)];
  if (m.announced) report(code, "mbarrier: a phase of the one " + place_text(at) + " is announced twice");
  m.announced = true;
  m.expected = bytes;
  if (m.arrived > bytes)
    report(code, text("mbarrier: ", m.arrived, " bytes come to the one ", place_text(at), ", ", bytes, " are announced"));
  end_phase(m);
}
void send(float* to, uint64_t* at, int block, float value) {
  const void* const code = __builtin_return_address(0);
  const auto there = [&](void* address) { return block_shared_memory(block) + shared_offset(reinterpret_cast<uintptr_t>(address)); };
  const int mbarrier_number = used(reinterpret_cast<uint64_t*>(there(at)), code);
  bring(mbarrier_number, true, block, there(to), &value, sizeof(value), code);
  join(mbarriers[mbarrier_number].sent, clocks[warp_index(running)]);
  end_phase(mbarriers[mbarrier_number]);
}
void bulk_copy(void* to, const void* from, int bytes, uint64_t* at) {
  const void* const code = __builtin_return_address(0);
  const int mbarrier_number = used(at, code);
  if (bytes <= 0 || bytes % 16 != 0) report(code, text("bulk copy of ", bytes, " bytes, expected a multiple of 16"));
  load_global(from, bytes, code);
  bring(mbarrier_number, false, block_index(running), static_cast<unsigned char*>(to), from, bytes, code);
  end_phase(mbarriers[mbarrier_number]);
}
void finish_reads_before_copies() {
  for (Cell* const cell : unfenced[running]) --cell->unfenced;
  unfenced[running].clear();
}

void async_copy(void* to, const void* from) {
  constexpr int bytes = 16;
  const void* const code = __builtin_return_address(0);
  load_global(from, bytes, code);
  reserve(block_index(running), to, bytes, asynchronous, code);
  auto& groups = copy_groups[running];
  if (groups.empty()) groups.emplace_back();
  const auto* const data = static_cast<const unsigned char*>(from);
  groups.back().push_back({static_cast<unsigned char*>(to), {data, data + bytes}});
}
void close_copies() {
  auto& groups = copy_groups[running];
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}
void wait_for_copies(int left) {
  auto& groups = copy_groups[running];
  while (int(groups.size()) - 1 > left) {  // the last group is open
    for (const Copy& copy : groups.front()) {
      std::memcpy(copy.to, copy.data.data(), copy.data.size());
      const int64_t offset = shared_offset(reinterpret_cast<uintptr_t>(copy.to));
      for (int64_t at = offset; at < offset + int64_t(copy.data.size()); at += granule) {
        Cell& cell = shared_cell(block_index(running), at);
        cell.transfer = 0;
        cell.write_warp = warp_ticks[warp_index(running)];  // the wait counts as the store
      }
    }
    groups.erase(groups.begin());
  }
}

}  // namespace liger::gpu::simt
