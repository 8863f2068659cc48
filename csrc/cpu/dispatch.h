// Threads and the choice of instruction set, for dispatch*.cpp: baseline code, the only place that sees both torch and kernels.
//
// A kernel file defines, in its build's namespace (liger::cpu::baseline, avx2, avx512),
//   template <> void run(const Args& args, int64_t begin, int64_t end)   // items begin … end-1; must not throw
// and a dispatch file starts it by  parallel_items(args, items, elements_per_item).
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace liger::cpu {

enum class Isa { baseline, avx2, avx512 };

// The best that this machine has; LIGER_EXT_CPU_ISA=baseline|avx2|avx512 lowers it. Decided once.
Isa isa();

namespace baseline {
template <class Args> void run(const Args&, int64_t begin, int64_t end);
}
namespace avx2 {
template <class Args> void run(const Args&, int64_t begin, int64_t end);
}
namespace avx512 {
template <class Args> void run(const Args&, int64_t begin, int64_t end);
}

template <class Args> using Kernel = void(const Args&, int64_t begin, int64_t end);

template <class Args>
Kernel<Args>* kernel() {
#if LIGER_HAS_AVX512
  if (isa() == Isa::avx512) return &avx512::run<Args>;
#endif
#if LIGER_HAS_AVX2
  if (isa() == Isa::avx2) return &avx2::run<Args>;
#endif
  return &baseline::run<Args>;
}

// Splits [0, items) among torch's threads; one thread gets at least this many elements, since waking another takes microseconds.
constexpr int64_t elements_per_task = 32768;

template <class Args>
void parallel_items(const Args& args, int64_t items, int64_t elements_per_item) {
  Kernel<Args>* const run = kernel<Args>();
  const int64_t grain = std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, elements_per_item));
  torch::stable::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) { run(args, begin, end); });
}

}  // namespace liger::cpu
