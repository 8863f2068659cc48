// CPU kernels of the passes in kernels/elementwise.h: conversion with a scale, fill, column sums. All are bound by memory.
#include "kernels/elementwise.h"

#include <algorithm>

#include "cpu/simd.h"

namespace liger::cpu::LIGER_ISA {

template <> [[gnu::flatten]] void run(const ScaleCast& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.out, a.rows, a.cols);
  dispatch(a.in.dtype, [&](auto t) {
    using In_ = decltype(t);
    using Acc = std::conditional_t<std::is_same_v<In_, double>, double, float>;
    const Acc scale = a.scale != nullptr ? *static_cast<const Acc*>(a.scale) : Acc(1);
    dispatch(a.out.dtype, [&](auto u) {
      for (int64_t i = begin; i < end; ++i) {
        const auto in = row<In_>(a.in, i);
        const auto out = row<decltype(u)>(a.out, i, stream);
        const Acc factor = a.row_scale.data != nullptr ? scale * load<Acc>(row<any>(a.row_scale, i), 0, Part{1})[0] : scale;
        columns<Acc>(a.cols, [&](int64_t j, auto n) { store(out, j, n, load<Acc>(in, j, n) * factor); });
      }
    });
  });
  if (stream) stream_fence();
}

template <> [[gnu::flatten]] void run(const FillRows& a, int64_t begin, int64_t end) {
  dispatch_same({a.matrix.dtype}, [&](auto t, auto acc) {
    using Acc = decltype(acc);
    with_param<decltype(t)>(a.values, 0, [&](const auto& values) {
      for (int64_t i = begin; i < end; ++i) {
        const auto out = row<decltype(t)>(a.matrix, i);
        columns<Acc>(a.cols, [&](int64_t j, auto n) { store(out, j, n, load<Acc>(values, j, n)); });
      }
    });
  });
}

// Sums columns begin … end-1. A band of columns is summed over all rows, with its sums in the L1 cache: blocks of 256 rows are added up,
// then added to the total. So rounding errors grow with the number of blocks, not of rows.
template <> [[gnu::flatten]] void run(const ColumnSum& a, int64_t begin, int64_t end) {
  constexpr int64_t band = 512, block_rows = 256;
  dispatch_same({a.in.dtype}, [&](auto t, auto acc) {
    using Acc = decltype(acc);
    Acc partial[band];
    for (int64_t first = begin; first < end; first += band) {
      const int64_t cols = std::min(band, end - first);
      const Out<Acc> total{static_cast<Acc*>(a.sum) + first, false}, block{partial, false};
      if (!a.accumulate) std::fill_n(total.data, cols, Acc(0));
      for (int64_t top = 0; top < a.rows; top += block_rows) {
        std::fill_n(partial, cols, Acc(0));
        for (int64_t i = top; i < std::min(a.rows, top + block_rows); ++i) {
          const auto in = row<decltype(t)>(a.in, i);
          const Acc factor = a.row_scale.data != nullptr ? load<Acc>(row<any>(a.row_scale, i), 0, Part{1})[0] : Acc(1);
          columns<Acc>(cols, [&](int64_t j, auto n) {
            store(block, j, n, load<Acc>(In<Acc>{partial}, j, n) + load<Acc>(in, first + j, n) * factor);
          });
        }
        columns<Acc>(
            cols, [&](int64_t j, auto n) { store(total, j, n, load<Acc>(In<Acc>{total.data}, j, n) + load<Acc>(In<Acc>{partial}, j, n)); });
      }
    }
  });
}

}  // namespace liger::cpu::LIGER_ISA
