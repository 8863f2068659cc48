// Adds the partial rows of parameter gradients (partials.h). It sums a group of columns at a time: the running sums stay in L1, and each
// partial row is read in runs of a kilobyte. It sums batches of partial rows, so that rounding errors grow with the number of batches.
#include "cpu/partials.h"

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

template <class Acc> [[gnu::flatten]] void sum_group(const SumPartials& a, int64_t first, int64_t count) {
  alignas(vector_bytes) Acc sums[partial_columns] = {};
  constexpr int64_t batch = 16;
  for (int64_t block = 0; block < a.blocks; block += batch) {
    const Acc* partial = static_cast<const Acc*>(a.data) + block * a.stride + first;
    const int64_t blocks = a.blocks - block < batch ? a.blocks - block : batch;
    columns<Acc>(count, [&](int64_t j, auto n) {
      auto sum = load<Acc>(partial + j, n);
      for (int64_t i = 1; i < blocks; ++i) sum += load<Acc>(partial + i * a.stride + j, n);
      store<Acc>(sums + j, n, load<Acc>(sums + j, n) + sum);
    });
  }
  const Out<any> out = param<any>(a.out);
  columns<Acc>(count, [&](int64_t j, auto n) { store(out, first + j, n, load<Acc>(sums + j, n)); });
}

}  // namespace

template <> void run(const SumPartials& a, int64_t begin, int64_t end) {
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = group * partial_columns, rest = a.cols - first, count = rest < partial_columns ? rest : partial_columns;
    if (a.accumulator == Dtype::f64) sum_group<double>(a, first, count);
    else sum_group<float>(a, first, count);
  }
}

}  // namespace liger::cpu::LIGER_ISA
