// Runs CPU kernels on torch's threads, in the selected instruction set. Only dispatch*.cpp and gemm.cpp may include it. They are compiled
// for the baseline (the compiler's default instruction set), as are all files that include torch's headers.
//
// A kernel file defines, in the namespace of its build (liger::cpu::baseline, avx2 or avx512),
//   template <> void run(const Args& args, int64_t begin, int64_t end)   // items begin … end-1; must not throw
// An item is a kernel's unit of work, such as a row; parallel_items divides the items among threads. A dispatch file starts the kernel by
// parallel_items(args, items, elements_per_item, outputs). elements_per_item decides how many items a thread gets at least. `outputs` names
// large results, whose pages are mapped shortly before an item writes them (MappedOutput).
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "kernels/types.h"

namespace liger::cpu {

enum class Isa { baseline, avx2, avx512 };

// The best instruction set of this machine for which the library has kernels, or a lower one that LIGER_EXT_CPU_ISA=baseline|avx2|avx512
// sets. Selected at the first call.
Isa isa();

// Throws the error for an isa() without kernels: a build for one machine (LIGER_EXT_CPU_NATIVE) has those of one instruction set.
[[noreturn]] void throw_no_kernels();

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

template <class Args> Kernel<Args>* kernel() {
#if LIGER_HAS_AVX512
  if (isa() == Isa::avx512) return &avx512::run<Args>;
#endif
#if LIGER_HAS_AVX2
  if (isa() == Isa::avx2) return &avx2::run<Args>;
#endif
#if LIGER_HAS_BASELINE
  if (isa() == Isa::baseline) return &baseline::run<Args>;
#endif
  throw_no_kernels();
}

// parallel_items splits [0, items) among torch's threads. A thread gets about this many elements or more, since waking a thread takes
// microseconds.
constexpr int64_t elements_per_task = 32768;

// An output matrix. The pages of a large one are mapped shortly before a kernel writes them. glibc maps a new block for every tensor of
// 32 MiB or more, so the pages of large outputs are new at each call. Faulting them in one by one takes longer than a row op's arithmetic.
// Mapping half a megabyte at a time is faster (docs/measurements.md), and costs almost nothing if the pages are mapped already.
class MappedOutput {
 public:
  // Item i writes rows_per_item rows, from row i * rows_per_item on.
  MappedOutput(const MutableRows& out, int64_t rows, int64_t cols, int64_t rows_per_item = 1);
  MappedOutput(const Rows&, int64_t, int64_t) {}  // an input: nothing to map
  // The number of items that write half a megabyte; 0: this memory is not mapped ahead.
  int64_t step() const { return step_; }
  void map(int64_t begin, int64_t end) const;

 private:
  uintptr_t data_ = 0;
  int64_t bytes_ = 0, item_bytes_ = 0, step_ = 0;
};

template <class Args>
void parallel_items(const Args& args, int64_t items, int64_t elements_per_item, std::initializer_list<MappedOutput> outputs = {}) {
  Kernel<Args>* const run = kernel<Args>();
  const int64_t grain = std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, elements_per_item));
  int64_t step = 0;
  for (const MappedOutput& out : outputs)
    if (out.step() > 0) step = step == 0 ? out.step() : std::min(step, out.step());
  torch::stable::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) {
    if (step == 0) return run(args, begin, end);
    for (int64_t first = begin; first < end; first += step) {
      const int64_t last = std::min(end, first + step);
      for (const MappedOutput& out : outputs)
        if (out.step() > 0) out.map(first, last);
      run(args, first, last);
    }
  });
}

// The same matrix from element `from` on, with another stride.
template <class Matrix> Matrix restrided(Matrix matrix, int64_t from, int64_t stride) {
  using Byte = std::conditional_t<std::is_same_v<Matrix, Rows>, const char, char>;
  return {static_cast<Byte*>(matrix.data) + from * dtype_bytes(matrix.dtype), stride, matrix.dtype};
}

// Runs an elementwise kernel, whose matrices are these members of args. Short rows without gaps are cut anew into rows of 4096 elements and
// a remainder, so that threads and vectors get equal shares for any shape.
template <auto... Matrices, class Args> void parallel_elements(const Args& args) {
  constexpr int64_t cols = 4096;
  const auto over_rows = [](const Args& a) { parallel_items(a, a.rows, a.cols, {MappedOutput(a.*Matrices, a.rows, a.cols)...}); };
  const bool gaps = (((args.*Matrices).stride != args.cols) || ...);
  if (args.rows <= 1 || args.cols >= cols || gaps) return over_rows(args);
  const int64_t numel = args.rows * args.cols, whole = numel / cols * cols;
  Args flat = args, rest = args;
  flat.rows = whole / cols;
  flat.cols = cols;
  rest.rows = 1;
  rest.cols = numel - whole;
  ((flat.*Matrices = restrided(args.*Matrices, 0, cols)), ...);
  ((rest.*Matrices = restrided(args.*Matrices, whole, 0)), ...);
  if (flat.rows > 0) over_rows(flat);
  if (rest.cols > 0) kernel<Args>()(rest, 0, 1);
}

}  // namespace liger::cpu
