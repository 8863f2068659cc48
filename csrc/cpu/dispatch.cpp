// Selects the instruction set of the CPU kernels, reads the size of the last-level cache, and maps the pages of large outputs before
// kernels write them: many pages at a time, because a page fault for each page takes longer.
#include "cpu/dispatch.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace liger::cpu {
namespace {

constexpr const char* isa_names[] = {"baseline", "avx2", "avx512"};

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if LIGER_HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Isa::avx512;
#endif
#if LIGER_HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return Isa::avx2;
#endif
#endif
  return Isa::baseline;
}

Isa chosen_isa() {
  const Isa best = best_isa();
  if (const char* wish = std::getenv("LIGER_EXT_CPU_ISA"))
    for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
      if (std::strcmp(wish, isa_names[int(isa)]) == 0) return std::min(isa, best);
  return best;
}

}  // namespace

Isa isa() {
  static const Isa chosen = chosen_isa();
  return chosen;
}

void throw_no_kernels() {
  throw std::runtime_error(std::string("liger_ext was built for one instruction set of CPUs, and the selected one is another: ") +
                           isa_names[int(isa())] +
                           ", by LIGER_EXT_CPU_ISA or because this machine lacks the other. Build every instruction set: make build");
}

// The size of the last-level cache. Kernels store larger outputs past the caches (streams() in simd.h). Some virtual machines report no
// size.
int64_t last_level_cache_bytes() {
  static const int64_t bytes = [] {
    int64_t size = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    size = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return size > 0 ? size : int64_t{32} << 20;
  }();
  return bytes;
}

MappedOutput::MappedOutput(const MutableRows& out, int64_t rows, int64_t cols, int64_t rows_per_item)
    : data_(reinterpret_cast<uintptr_t>(out.data)),
      bytes_(((rows - 1) * out.stride + cols) * dtype_bytes(out.dtype)),
      item_bytes_(rows_per_item * out.stride * dtype_bytes(out.dtype)) {
  constexpr int64_t fresh = 32 << 20, ahead = 512 << 10;
  const bool dense = out.stride <= 2 * cols;  // rows of a whole tensor or of its halves: larger gaps would be mapped and never written
  if (out.data != nullptr && rows > 0 && dense && bytes_ >= fresh) step_ = std::max<int64_t>(1, ahead / std::max<int64_t>(1, item_bytes_));
}

void MappedOutput::map([[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t end) const {
#if defined(MADV_POPULATE_WRITE)
  static const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (data_ + uintptr_t(begin * item_bytes_)) / page * page;
  const uintptr_t last = (data_ + uintptr_t(std::min(bytes_, end * item_bytes_))) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_POPULATE_WRITE);  // on failure, the first access maps a page
#endif
}

}  // namespace liger::cpu

// Returns the name of the selected instruction set; Python calls it through ctypes.
extern "C" __attribute__((visibility("default"))) const char* liger_ext_cpu_isa() { return liger::cpu::isa_names[int(liger::cpu::isa())]; }
