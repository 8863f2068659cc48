// Helpers for ops/*.cpp, which implement the CPU backend's interface with the GPU kernels. The library of these files replaces
// liger_ext_cpu, so that the ops and their tests run on the host target. Most functions in ops/ list the memory that their kernels may
// touch, and call the function of the same name in csrc/gpu. (ops/ declares those functions itself, because here kernels/*.h declare the
// CPU backend's only.)
#pragma once
#include "gpu/device.h"
#include "gpu/host/memory.h"
#include "gpu/platform.h"
#include "kernels/types.h"

namespace liger::cpu {

using gpu::simt::Buffer;
using gpu::simt::Buffers;
using gpu::simt::Content;

constexpr int64_t f32 = sizeof(float), i64 = sizeof(int64_t);

// n elements of `element` bytes each.
inline Buffer in(const char* name, const void* data, int64_t n, int64_t element) {
  return {name, data, n * element, Content::input, {}, element};
}
inline Buffer out(const char* name, const void* data, int64_t n, int64_t element, Content content = Content::output) {
  return {name, data, n * element, content, {}, element};
}
inline Buffer in(const char* name, const Vector& v, int64_t n) { return in(name, v.data, n, dtype_bytes(v.dtype)); }
inline Buffer out(const char* name, const MutableVector& v, int64_t n) { return out(name, v.data, n, dtype_bytes(v.dtype)); }
// A matrix. Rows without gaps are one run, since a vector may cross from one row into the next. A launch that touches the matrix must
// declare the matrix's rows x columns. A matrix of a single column (one number per row) is not compared with the launch.
template <class AnyRows> Buffer matrix(const char* name, const AnyRows& r, int64_t rows, int64_t cols, Content content) {
  const int64_t bytes = dtype_bytes(r.dtype), row = r.stride * bytes, each = cols > 1;
  if (r.stride == cols) return {name, r.data, rows * cols * bytes, content, {}, bytes, row, each};
  return {name, r.data, cols * bytes, content, {{rows, row}}, bytes, row, each};
}
inline Buffer in(const char* name, const Rows& r, int64_t rows, int64_t cols) { return matrix(name, r, rows, cols, Content::input); }
inline Buffer out(const char* name, const MutableRows& r, int64_t rows, int64_t cols) {
  return matrix(name, r, rows, cols, Content::output);
}
// Marks memory that need not be read or written: the whole buffer, or the rows (or elements) for which which(index) is true.
inline Buffer optional(Buffer buffer) {
  buffer.optional = [](int64_t) { return true; };
  return buffer;
}
template <class Which> Buffer optional_rows(Buffer buffer, Which which) {
  if (buffer.dimensions[0].count > 1 && buffer.dimensions[0].stride < buffer.bytes) return optional(buffer);  // overlapping rows
  buffer.optional = [which, row = buffer.row > 0 ? buffer.row : buffer.element](int64_t offset) { return which(offset / row); };
  return buffer;
}
inline Buffer workspace(const void* data, int64_t bytes) { return optional(out("workspace", data, bytes / f32, f32)); }

}  // namespace liger::cpu
