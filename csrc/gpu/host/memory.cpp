#include "gpu/host/memory.h"
#include <map>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>

#include "gpu/host/simt.h"
#include "kernels/errors.h"

namespace liger::gpu::simt {
namespace {

// Time is one counter: every block start and every barrier is a tick, so that the order of two accesses can be read off their ticks.
uint32_t now = 1, launch_start = 1, block_start = 1, block_tick = 1;
uint32_t warp_ticks[32];
int running = -1, warp_size = 32;
// The last group barrier of each warp, and the warps that it was of.
struct Group {
  uint32_t tick = 0;
  int first = 0, end = 0;
  bool holds(int first_warp, int last_warp) const { return first <= first_warp && last_warp < end; }
} groups[32];

// What is known of two bytes: the last write, the last reads, and the first read of the launch. Tick 0: never.
struct Cell {
  uint32_t write_block, write_warp;  // ticks of the last block barrier and warp barrier before it
  uint32_t read_block, read_warp, first_read;
  uint16_t writer, reader;
  uint8_t first_warp, last_warp;     // readers since the barrier that a read was last ordered by
  bool many_lanes;                   // more readers since the warp barrier
};
constexpr int64_t granule = 2;

struct FreeCells {
  void operator()(Cell* cells) const { std::free(cells); }
};
using Cells = std::unique_ptr<Cell[], FreeCells>;
// calloc: pages that no kernel touches cost nothing.
Cells make_cells(int64_t bytes) {
  Cells cells(static_cast<Cell*>(std::calloc(static_cast<size_t>(bytes / granule + 2), sizeof(Cell))));
  if (!cells) throw std::bad_alloc();
  return cells;
}

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t at, int64_t size) const { return at >= begin && at + uintptr_t(size) <= end; }
  bool touches(uintptr_t at) const { return at >= begin && at < end; }
};
// The span of buffers that overlap, as views of one tensor do, or an op's output in its input's memory.
struct Region {
  Range range;
  std::vector<Buffer> buffers;
  Cells cells;

  const Cell& cell(const Buffer& buffer, int64_t offset) const {
    return cells[int64_t(reinterpret_cast<uintptr_t>(buffer.data) - range.begin + uintptr_t(offset)) / granule];
  }
};

std::vector<Region> regions;
std::vector<std::string> launched;  // kernels, since there are these regions
std::vector<Range> allowed;
Range stacks, arguments;

// Shared memory lies in the middle of an arena: accesses beside it are seen as such.
constexpr int64_t shared_room = 256 << 10, shared_margin = 1 << 20;
alignas(4096) unsigned char arena[shared_margin + shared_room + shared_margin];
int64_t shared_bytes = 0;

struct Access {
  uintptr_t at;
  int64_t size;
  bool writes, aligned;
  const void* code;  // behind the access
  const char* verb() const { return writes ? "stores" : "loads"; }
};

int warp_of(int thread) { return thread / warp_size; }

// Who was it, in a sentence about an earlier access at `tick` by `thread`?
std::string other(uint32_t tick, int thread, const char* did) {
  if (tick < block_start) return text("another block has ", did, " them in this launch");
  if (thread == running) return text("other threads have ", did, " them with no barrier between");
  return text("thread ", thread, " has ", did, " them", warp_of(thread) == warp_of(running) ? ", of the same warp," : "",
              " with no barrier between");
}

// Did an earlier access of the launch happen in no order with one of the running thread's?
bool races(uint32_t block, uint32_t warp, int thread) {
  if (block < launch_start) return false;
  if (block < block_start) return true;
  if (block < block_tick || thread == running) return false;
  const int other = warp_of(thread), own = warp_of(running);
  if (other == own) return warp >= warp_ticks[own];
  return !groups[own].holds(other, other) || warp >= groups[own].tick;
}

// Was every read before a barrier that the running thread has passed?
bool reads_are_over(const Cell& cell) {
  const Group& group = groups[warp_of(running)];
  return cell.read_block != block_tick || (group.holds(cell.first_warp, cell.last_warp) && cell.read_warp < group.tick);
}

void note(Cell& cell, const Access& access) {
  const int warp = warp_of(running);
  const uint32_t warp_tick = warp_ticks[warp];
  if (access.writes) {
    cell.write_block = block_tick;
    cell.write_warp = warp_tick;
    cell.writer = uint16_t(running);
    return;
  }
  if (cell.first_read < launch_start) cell.first_read = block_tick;
  const bool same_interval = !reads_are_over(cell), same_warp = same_interval && warp_of(cell.reader) == warp;
  cell.first_warp = uint8_t(same_interval ? std::min<int>(cell.first_warp, warp) : warp);
  cell.last_warp = uint8_t(same_interval ? std::max<int>(cell.last_warp, warp) : warp);
  cell.many_lanes = same_warp && cell.read_warp == warp_tick && (cell.many_lanes || cell.reader != running);
  cell.read_block = block_tick;
  cell.read_warp = warp_tick;
  cell.reader = uint16_t(running);
}

// name(): where the access is.
template <class Name> void check_order(const Cell& cell, const Access& access, const Name& name) {
  const auto race = [&](uint32_t tick, int thread, const char* did) {
    report(access.code, text("race: ", access.verb(), " ", access.size, " bytes ", name(), "; ", other(tick, thread, did)));
  };
  if (races(cell.write_block, cell.write_warp, cell.writer)) race(cell.write_block, cell.writer, "written");
  if (!access.writes) return;
  if (cell.first_read >= launch_start && cell.first_read < block_start) race(cell.first_read, cell.reader, "read");
  const bool others = !reads_are_over(cell) &&
                      (cell.first_warp != cell.last_warp ||
                       (cell.many_lanes && warp_of(cell.reader) == warp_of(running) && cell.read_warp >= warp_ticks[warp_of(running)]));
  if (others || races(cell.read_block, cell.read_warp, cell.reader)) race(cell.read_block, cell.reader, "read");
}

template <class Name> void check_alignment(const Access& access, const Name& name) {
  const int64_t alignment = access.size % 16 == 0 ? 16 : access.size & -access.size;
  if (access.aligned && access.at % uintptr_t(alignment) != 0)
    report(access.code, text("misaligned: ", access.verb(), " ", access.size, " bytes ", name(), ", which is no multiple of ", alignment));
}

void touch_shared(const Access& access) {
  const int64_t offset = int64_t(access.at - uintptr_t(arena)) - shared_margin;
  const auto name = [&] { return text("at shared memory + ", offset); };
  if (offset < 0 || offset + access.size > shared_bytes)
    report(access.code,
           text("out of bounds: ", access.verb(), " ", access.size, " bytes ", name(), "; the launch asked for ", shared_bytes, " bytes"));
  check_alignment(access, name);
  static const Cells cells = make_cells(shared_room);
  for (int64_t at = offset / granule; at < (offset + access.size + granule - 1) / granule; ++at) {
    Cell& cell = cells[at];
    if (cell.write_block < block_start) {  // of an earlier block: nothing that this one knows
      if (!access.writes)
        report(access.code,
               text("uninitialised: loads ", access.size, " bytes ", name(), ", which no thread of the block has written yet"));
      cell = {};
    }
    check_order(cell, access, name);
    note(cell, access);
  }
}

void touch_global(const Access& access) {
  static Region* last = nullptr;
  if (last == nullptr || last < regions.data() || last >= regions.data() + regions.size() || !last->range.touches(access.at)) {
    last = nullptr;
    for (Region& region : regions)
      if (region.range.touches(access.at)) last = &region;
  }
  const Buffer *inside = nullptr, *near = nullptr;
  const auto offset_in = [&](const Buffer& buffer) { return int64_t(access.at - uintptr_t(buffer.data)); };
  if (last != nullptr)
    for (const Buffer& buffer : last->buffers) {
      near = &buffer;
      if (!buffer.holds(offset_in(buffer), access.size)) continue;
      // Of several views the one that allows the access.
      if (inside == nullptr || (access.writes ? inside->content == Content::input : inside->content == Content::output)) inside = &buffer;
    }
  if (inside == nullptr) {
    for (const Range& range : allowed)
      if (range.holds(access.at, access.size)) return;
    int64_t closest = INT64_MAX;
    if (near == nullptr)
      for (const Region& region : regions)
        for (const Buffer& buffer : region.buffers) {
          const int64_t offset = offset_in(buffer), distance = offset < 0 ? -offset : offset - buffer.extent();
          if (distance < closest) closest = distance, near = &buffer;
        }
    report(access.code, text("out of bounds: ", access.verb(), " ", access.size, " bytes ",
                             near ? "outside of all buffers, " + near->at(offset_in(*near)) : "of global memory without any buffer"));
  }
  const auto name = [&] { return inside->at(offset_in(*inside)); };
  if (access.writes && inside->content == Content::input)
    report(access.code, text("out of bounds: stores ", access.size, " bytes ", name(), ", an input"));
  check_alignment(access, name);
  const int64_t first = int64_t(access.at - last->range.begin);
  for (int64_t at = first / granule; at < (first + access.size + granule - 1) / granule; ++at) {
    Cell& cell = last->cells[at];
    if (!access.writes && inside->content == Content::output && cell.write_block == 0)
      report(access.code, text("uninitialised: loads ", access.size, " bytes ", name(), ", which no kernel has written yet"));
    check_order(cell, access, name);
    note(cell, access);
  }
}

void check(const Access& access) {
  if (access.at >= uintptr_t(arena) && access.at < uintptr_t(arena) + sizeof(arena)) return touch_shared(access);
  if (access.writes || !arguments.holds(access.at, access.size)) touch_global(access);
}

// Inlined into what the compiler calls, so that the return address is the access's.
[[gnu::always_inline]] inline void touch(const void* pointer, int64_t size, bool writes, bool aligned = true) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
  if (running >= 0 && !stacks.touches(at)) check({at, size, writes, aligned, __builtin_return_address(0)});
}

std::string kernels_launched() {
  std::string lines;
  for (const std::string& kernel : launched) lines += "\n  kernel " + kernel;
  return lines.empty() ? "\n  no kernel was launched" : lines;
}

// What the op's kernels, which are all there are, have left out; empty: nothing.
std::string unfinished() {
  for (const Region& region : regions)
    for (const Buffer& buffer : region.buffers) {
      const bool input = buffer.content == Content::input;
      int64_t missing = 0, first = 0;
      buffer.visit(granule, [&](int64_t offset) {
        const Cell& cell = region.cell(buffer, offset);
        if ((input ? cell.first_read : cell.write_block) != 0 || (buffer.optional && buffer.optional(offset))) return;
        if (missing++ == 0) first = offset;
      });
      if (missing > 0)
        return text("host target: ", input ? "unread: " : "unwritten: ", missing * granule, " bytes, the first ", buffer.at(first),
                    kernels_launched());
    }
  return {};
}

}  // namespace

Buffers::Buffers(const std::vector<Buffer>& given) {
  std::vector<Buffer> buffers;
  for (const Buffer& buffer : given)
    if (!buffer.empty()) buffers.push_back(buffer);
  const auto address = [](const Buffer& b) { return reinterpret_cast<uintptr_t>(b.data); };
  std::sort(buffers.begin(), buffers.end(), [&](const Buffer& a, const Buffer& b) { return address(a) < address(b); });
  for (const Buffer& buffer : buffers) {
    const uintptr_t begin = address(buffer), end = begin + uintptr_t(buffer.extent());
    if (regions.empty() || begin >= regions.back().range.end) regions.push_back({{begin, end}, {}, {}});
    Region& region = regions.back();
    region.range.end = std::max(region.range.end, end);
    region.buffers.push_back(buffer);
  }
  for (Region& region : regions) {
    region.range.begin -= region.range.begin % granule;
    region.cells = make_cells(int64_t(region.range.end - region.range.begin));
  }
}
Buffers::~Buffers() noexcept(false) {
  const std::string finding = std::uncaught_exceptions() > 0 ? "" : unfinished();
  regions.clear();
  launched.clear();
  if (!finding.empty()) throw std::runtime_error(finding);
}

void allow(const void* data, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  allowed.push_back({begin, begin + bytes});
}

namespace memory {

void begin_launch(const std::string& kernel, const void* args, size_t args_bytes, const unsigned char* stack, size_t stack_bytes, int warp,
                  int shared) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(args), low = reinterpret_cast<uintptr_t>(stack);
  arguments = {first, first + args_bytes};
  stacks = {low, low + stack_bytes};
  warp_size = warp;
  shared_bytes = shared;
  launch_start = now + 1;
  launched.push_back(kernel);
}
// Every matrix that the launch has touched must agree, and there must be one, or anything else of as many elements: buffers of one name
// are parts of one.
void check_launch(int64_t rows, int64_t cols) {
  bool any = rows * cols == 0;
  std::map<std::string, int64_t> parts;
  for (const Region& region : regions)
    for (const Buffer& buffer : region.buffers) {
      int64_t touched = 0, left_out = 0;
      buffer.visit(buffer.element, [&](int64_t offset) {
        const Cell& cell = region.cell(buffer, offset);
        const bool is = cell.write_block >= launch_start || cell.first_read >= launch_start;
        touched += is;
        left_out += !is && buffer.each > 0 && buffer.optional && buffer.optional(offset);
      });
      const int64_t elements = rows * cols * std::max<int64_t>(buffer.each, 1);
      any = any || touched + left_out == elements || (parts[buffer.name] += touched) == elements;
      if (buffer.each > 0 && touched > 0 && touched + left_out != elements)
        throw std::runtime_error(text("host target: uncovered: the launch declares ", rows, " rows of ", cols,
                                      " columns, its threads touch ", touched, " elements ", buffer.at(0), ", not ", elements - left_out,
                                      "\n  kernel ", launched.back()));
    }
  if (!any)
    throw std::runtime_error(text("host target: uncovered: the launch declares ", rows, " rows of ", cols,
                                  " columns, its threads touch so many elements of no buffer\n  kernel ", launched.back()));
}
void begin_block() {
  at_block_barrier();
  block_start = block_tick;
}
void end_launch() { running = -1; }
void begin_thread(int thread) { running = thread; }
void at_block_barrier() {
  block_tick = ++now;
  std::fill(std::begin(warp_ticks), std::end(warp_ticks), now);
}
void at_group_barrier(int first_warp, int end_warp) {
  ++now;
  std::fill(warp_ticks + first_warp, warp_ticks + end_warp, now);
  std::fill(groups + first_warp, groups + end_warp, Group{now, first_warp, end_warp});
}
void at_warp_barrier(int warp) { warp_ticks[warp] = ++now; }
unsigned char* shared() { return arena + shared_margin; }

}  // namespace memory
}  // namespace liger::gpu::simt

// What the compiler calls. "Unaligned": the type does not promise more than bytes.
using liger::gpu::simt::touch;
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read1(void* p) { touch(p, 1, false); }
void __tsan_read2(void* p) { touch(p, 2, false); }
void __tsan_read4(void* p) { touch(p, 4, false); }
void __tsan_read8(void* p) { touch(p, 8, false); }
void __tsan_read16(void* p) { touch(p, 16, false); }
void __tsan_write1(void* p) { touch(p, 1, true); }
void __tsan_write2(void* p) { touch(p, 2, true); }
void __tsan_write4(void* p) { touch(p, 4, true); }
void __tsan_write8(void* p) { touch(p, 8, true); }
void __tsan_write16(void* p) { touch(p, 16, true); }
void __tsan_unaligned_read2(void* p) { touch(p, 2, false, false); }
void __tsan_unaligned_read4(void* p) { touch(p, 4, false, false); }
void __tsan_unaligned_read8(void* p) { touch(p, 8, false, false); }
void __tsan_unaligned_read16(void* p) { touch(p, 16, false, false); }
void __tsan_unaligned_write2(void* p) { touch(p, 2, true, false); }
void __tsan_unaligned_write4(void* p) { touch(p, 4, true, false); }
void __tsan_unaligned_write8(void* p) { touch(p, 8, true, false); }
void __tsan_unaligned_write16(void* p) { touch(p, 16, true, false); }
void __tsan_read_range(void* p, long size) { touch(p, size, false); }
void __tsan_write_range(void* p, long size) { touch(p, size, true); }
// clang's copies of structs
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  touch(from, int64_t(size), false);
  touch(to, int64_t(size), true);
  return std::memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  touch(from, int64_t(size), false);
  touch(to, int64_t(size), true);
  return std::memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  touch(to, int64_t(size), true);
  return std::memset(to, value, size);
}
}
