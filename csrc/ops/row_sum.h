// A sum of rows that is wider than what becomes of it: its first rows lie in the memory of that, the others in a rest. Its narrowing
// begins where it ends, so no more memory than the two is ever taken but for a few rows.
#pragma once
#include <algorithm>

#include "ops/head.h"

namespace liger::LIGER_BACKEND {

class RowSum {
 public:
  // in_memory: rows of the sum in `memory`. like: what allocations are made like.
  RowSum(const Scope& scope, int64_t rows, int64_t cols, Dtype dtype, int64_t in_memory, void* memory, void* rest, const Tensor& like)
      : scope_(scope), rows_(rows), cols_(cols), in_memory_(in_memory), dtype_(dtype), memory_(memory), rest_(rest), like_(like) {}

  // f(first, count, sum) of each part of a range of rows that lies in one memory.
  template <class F> void for_each_part(Range rows, F f) const {
    const int64_t inside = std::clamp(in_memory_ - rows.first, int64_t{0}, rows.count);
    if (inside > 0) f(rows.first, inside, from(rows.first));
    if (inside < rows.count) f(rows.first + inside, rows.count - inside, from(rows.first + inside));
  }
  // out = the sum * *factor, and each row's row_scale. out: in the sum's memory, or memory apart.
  void scale_into(const MutableRows& out, const void* factor, const Rows& row_scale) const;

 private:
  MutableRows from(int64_t row) const;
  void scale_rows(int64_t first, int64_t rows, const MutableRows& out, const void* factor, const Rows& row_scale) const;
  void narrow_in_place(const MutableRows& out, const void* factor, const Rows& row_scale) const;

  const Scope& scope_;
  int64_t rows_, cols_, in_memory_;
  Dtype dtype_;
  void *memory_, *rest_;
  const Tensor& like_;
};

}  // namespace liger::LIGER_BACKEND
