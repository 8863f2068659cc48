#include "ops/row_sum.h"

#include "kernels/elementwise.h"
#include "launch/chunks.h"

namespace liger::LIGER_BACKEND {

// Returns a view of the sum that starts at this row, and ends with the memory that holds the row: the result's or `rest`.
MutableRows RowSum::from(int64_t row) const {
  const bool inside = row < in_memory_;
  return from_row(MutableRows{inside ? memory_ : rest_, cols_, dtype_}, inside ? row : row - in_memory_);
}

void RowSum::scale_rows(int64_t first, int64_t rows, const MutableRows& out, const void* factor, const Rows& row_scale) const {
  if (rows > 0) scale_cast({rows, cols_, readable(from(first)), from_row(out, first), factor, from_row(row_scale, first)}, scope_);
}

void RowSum::scale_into(const MutableRows& out, const void* factor, const Rows& row_scale) const {
  const bool done = out.data == memory_ && out.dtype == dtype_ && factor == nullptr && row_scale.data == nullptr;
  if (cols_ == 0 || done) return;
  if (out.data == memory_ && out.dtype != dtype_) narrow_in_place(out, factor, row_scale);
  else scale_rows(0, in_memory_, out, factor, row_scale);
  scale_rows(in_memory_, rows_ - in_memory_, out, factor, row_scale);
}

// Converts rows to a narrower dtype in the same memory. The memory of the first `done` wide rows has room for `ratio` times as many narrow
// rows, so each step converts up to done * ratio rows. The first rows would overwrite themselves, so they are converted in other memory and
// copied back.
void RowSum::narrow_in_place(const MutableRows& out, const void* factor, const Rows& row_scale) const {
  const auto ratio = int64_t(dtype_bytes(dtype_) / dtype_bytes(out.dtype));
  int64_t done = std::min(launch::first_narrowed_rows, in_memory_);
  const Tensor elsewhere = allocate(scope_, {done, cols_}, out.dtype, like_);
  const MutableRows first = mutable_rows(elsewhere);
  scale_rows(0, done, first, factor, row_scale);
  if (done > 0) scale_cast({done, cols_, readable(first), out, nullptr, {}}, scope_);
  for (int64_t next; done < in_memory_; done = next) {
    next = std::min(done * ratio, in_memory_);
    scale_rows(done, next - done, out, factor, row_scale);
  }
}

}  // namespace liger::LIGER_BACKEND
