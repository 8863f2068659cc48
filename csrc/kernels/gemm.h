// Matrix products of row-major matrices, by torch on a CPU, by the matmul library that torch has loaded on a GPU:
//   C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + (accumulate ? C : 0), or + bias[n] in every row, mostly rounded once to C's dtype.
#pragma once
#include "kernels/elementwise.h"

namespace liger {

struct Matrix {
  const void* data;
  int64_t stride;       // from one stored row to the next
  Dtype dtype;
  bool transposed;      // op(X) is the transpose of the stored matrix
};

// The part of op(X) that begins at this row and column of op(X).
inline Matrix tile_at(const Matrix& x, int64_t row, int64_t col) {
  return {at(x.data, x.transposed ? col * x.stride + row : row * x.stride + col, x.dtype), x.stride, x.dtype, x.transposed};
}

struct Gemm {
  int64_t m, n, k;
  Matrix a, b;          // one dtype
  void* c;
  int64_t c_stride;
  Dtype c_dtype;        // the dtype of a and b, or fp32
  const void* alpha;    // one value in device memory (accumulator type); nullptr: 1
  bool accumulate;
  const void* bias = nullptr;  // n elements of C's dtype, or nullptr; not with alpha or accumulate
  bool all_bits = false;       // on a CPU, for 16-bit operands: true: an fp32 C has fp32's precision; false: 16 bits of mantissa or more
};

namespace LIGER_BACKEND {
void gemm(const Gemm&, Stream);

// Fills C with the bias, and returns the matmul that adds to it: for libraries without an epilogue that adds a bias.
inline Gemm with_bias_in_c(Gemm g, Stream stream) {
  fill_rows({g.m, g.n, {g.c, g.c_stride, g.c_dtype}, {g.bias, g.c_dtype}}, stream);
  g.accumulate = true;
  g.bias = nullptr;
  return g;
}
}  // namespace LIGER_BACKEND
}  // namespace liger
