// Matrix products with the library that torch has loaded, row-major:
//   C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + (accumulate ? C : 0).
#pragma once
#include "kernels/types.h"

namespace liger {

struct Matrix {
  const void* data;
  int64_t stride;       // from one stored row to the next
  Dtype dtype;
  bool transposed;      // op(X) is the transpose of what is stored
};

struct Gemm {
  int64_t m, n, k;
  Matrix a, b;          // one dtype
  void* c;
  int64_t c_stride;
  Dtype c_dtype;        // that of a and b, or fp32
  const void* alpha;    // one value in device memory (accumulator type); nullptr: 1
  bool accumulate;
};

namespace LIGER_BACKEND {
void gemm(const Gemm&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
