// Tests, from the addresses and strides of matrices, whether 16-byte accesses fit their rows.
#pragma once
#include "kernels/types.h"

namespace liger {

// Returns whether all rows start at a multiple of 16 bytes and consist of whole 16-byte vectors. Null data counts as aligned.
inline bool aligned(const Rows& r, int64_t cols) {
  const int64_t n = 16 / dtype_bytes(r.dtype);
  return r.data == nullptr || (reinterpret_cast<uintptr_t>(r.data) % 16 == 0 && r.stride % n == 0 && cols % n == 0);
}
inline bool aligned(const MutableRows& r, int64_t cols) { return aligned(Rows{r.data, r.stride, r.dtype}, cols); }
inline bool aligned(const Vector& v, int64_t cols) { return aligned(Rows{v.data, 0, v.dtype}, cols); }
// Returns whether the rows of both matrices start at the same offsets from a multiple of 16 bytes, and have one dtype.
inline bool equally_aligned(const Rows& a, const Rows& b) {
  const int64_t bytes = dtype_bytes(a.dtype);
  return a.dtype == b.dtype && (reinterpret_cast<uintptr_t>(a.data) - reinterpret_cast<uintptr_t>(b.data)) % 16 == 0 &&
         (a.stride - b.stride) * bytes % 16 == 0;
}

// The access of an elementwise op to rows of one dtype: the elements per access, and `contiguous`, true if there are no gaps between rows.
struct Elementwise {
  int vec;
  bool contiguous;
};
template <class... All> Elementwise elementwise(int64_t rows, int64_t cols, Dtype dtype, const All&... tensors) {
  return {(aligned(tensors, cols) && ...) ? 16 / int(dtype_bytes(dtype)) : 1,
          ((tensors.data == nullptr || tensors.stride == cols || rows == 1) && ...)};
}

}  // namespace liger
