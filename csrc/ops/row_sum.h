// RowSum: a matrix to which matmuls of several chunks add, mostly in a wider dtype than the result: dweight or dx in fp32 for a 16-bit
// result. The result's memory may hold the first rows of the sum; a second buffer (`rest`) holds the others. A conversion of the first rows
// to the result's dtype is then in place, and allocates at most 64 rows (launch::first_narrowed_rows).
#pragma once
#include <algorithm>

#include "ops/head.h"

namespace liger::LIGER_BACKEND {

class RowSum {
 public:
  // in_memory: the number of rows in `memory`. like: a tensor on the device on which the conversion allocates.
  RowSum(const Scope& scope, int64_t rows, int64_t cols, Dtype dtype, int64_t in_memory, void* memory, void* rest, const Tensor& like)
      : scope_(scope), rows_(rows), cols_(cols), in_memory_(in_memory), dtype_(dtype), memory_(memory), rest_(rest), like_(like) {}

  // Calls f(first, count, sum) for each part of a range of rows that lies in one of the two buffers.
  template <class F> void for_each_part(Range rows, F f) const {
    const int64_t inside = std::clamp(in_memory_ - rows.first, int64_t{0}, rows.count);
    if (inside > 0) f(rows.first, inside, from(rows.first));
    if (inside < rows.count) f(rows.first + inside, rows.count - inside, from(rows.first + inside));
  }
  // out = sum * *factor * row_scale of each row. out: `memory`, or memory that overlaps neither buffer.
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
