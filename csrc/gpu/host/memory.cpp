#include "gpu/host/memory.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>

#include "gpu/host/cells.h"
#include "gpu/host/transfers.h"

namespace liger::gpu::simt {
namespace {

using namespace memory;

// The span of buffers that overlap: views of one tensor, or an op's output in the memory of its input.
struct Region {
  Range range;
  std::vector<Buffer> buffers;
  Cells cells;

  const Cell& cell(const Buffer& buffer, int64_t offset) const {
    return cells[int64_t(reinterpret_cast<uintptr_t>(buffer.data) - range.begin + uintptr_t(offset)) / granule];
  }
};

std::vector<Region> regions;
std::vector<std::string> launched;  // kernels that were launched since the regions exist
std::vector<Range> allowed;
Range stacks, arguments;

void touch_shared(const Access& access) {
  const int64_t offset = shared_offset(access.at);
  const auto name = [&] { return text("at shared memory + ", offset); };
  if (offset < -shared_margin || offset >= shared_room + shared_margin)
    report(access.code, text("out of bounds: ", access.verb(), " ", access.size, " bytes of another block's shared memory"));
  if (offset < 0 || offset + access.size > shared_bytes)
    report(access.code,
           text("out of bounds: ", access.verb(), " ", access.size, " bytes ", name(), "; the launch asked for ", shared_bytes, " bytes"));
  check_alignment(access, name);
  for (int64_t at = offset / granule * granule; at < offset + access.size; at += granule) {
    Cell& cell = shared_cell(block_index(running), at);
    if (!access.writes && cell.write_block < block_start)
      report(access.code, text("uninitialised: loads ", access.size, " bytes ", name(), ", which no thread of the block has written yet"));
    if (const char* const finding = cell.transfer ? transfers::unready(cell) : nullptr)
      report(access.code, text("race: ", access.verb(), " ", access.size, " bytes ", name(), ", ", finding));
    check_order(cell, access, name);
    if (cell.transfer && !access.writes) transfers::loaded(cell);
    record_access(cell, access);
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
      // If several views cover the address, selects the view that allows the access.
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
    record_access(cell, access);
  }
}

void check(const Access& access) {
  if (access.at >= uintptr_t(arenas) && access.at < uintptr_t(arenas) + sizeof(arenas)) return touch_shared(access);
  if (access.writes || !arguments.holds(access.at, access.size)) touch_global(access);
}

// Inlined into the functions that the compiler calls, so that the return address is behind the access.
[[gnu::always_inline]] inline void touch(const void* pointer, int64_t size, bool writes, bool aligned = true) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
  if (running >= 0 && !stacks.touches(at)) check({at, size, writes, aligned, __builtin_return_address(0)});
}

std::string kernels_launched() {
  std::string lines;
  for (const std::string& kernel : launched) lines += "\n  kernel " + kernel;
  return lines.empty() ? "\n  no kernel was launched" : lines;
}

// Returns a finding about buffers that the op's kernels have not fully read or written; empty if there is none.
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

Buffers::Buffers(const std::vector<Buffer>& declared) {
  std::vector<Buffer> buffers;
  for (const Buffer& buffer : declared)
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
    region.cells = allocate_cells(int64_t(region.range.end - region.range.begin));
  }
}
Buffers::~Buffers() noexcept(false) {
  const std::string finding = std::uncaught_exceptions() > 0 ? "" : unfinished();
  regions.clear();
  launched.clear();
  if (!finding.empty()) throw std::runtime_error(finding);
}

void exclude_from_checks(const void* data, size_t bytes) {
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
// Every matrix that the launch has touched must have rows * cols touched elements, and at least one buffer must have as many. Buffers of
// the same name count as parts of one.
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
                                  " columns, there is no buffer of which its threads touch as many elements\n  kernel ", launched.back()));
}
void begin_blocks() {
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
unsigned char* shared() { return block_shared_memory(block_index(running)); }
void load_global(const void* from, int64_t bytes, const void* code) {
  touch_global({reinterpret_cast<uintptr_t>(from), bytes, false, true, code});
}

}  // namespace memory
}  // namespace liger::gpu::simt

// The functions that the compiler calls. "Unaligned": the type guarantees no alignment.
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
