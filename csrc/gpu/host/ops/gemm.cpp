// Matrix products of the host target. On GPUs they are a library's; here they are a plain loop with sums in double, since the tests are
// about the kernels that use the products.
#include "kernels/gemm.h"

#include <vector>

#include "gpu/host/buffers.h"

namespace liger::cpu {

void gemm(const Gemm& g, Stream stream) {
  if (g.bias && g.m * g.n > 0) return gemm(with_bias_in_c(g, stream), stream);
  // Rows must not overlap, as in a GPU's library.
  const auto apart = [](const Matrix& x, int64_t rows, int64_t cols) {
    return x.transposed ? cols <= 1 || x.stride >= rows : rows <= 1 || x.stride >= cols;
  };
  require(apart(g.a, g.m, g.k) && apart(g.b, g.k, g.n) && (g.m <= 1 || g.c_stride >= g.n), "gemm: rows overlap");
  const auto widened = [](const Matrix& x, int64_t rows, int64_t cols) {
    std::vector<float> out(size_t(rows * cols));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        out[i * cols + j] = gpu::load_one(x.data, x.dtype, x.transposed ? j * x.stride + i : i * x.stride + j);
    return out;
  };
  const std::vector<float> a = widened(g.a, g.m, g.k), b = widened(g.b, g.k, g.n);
  const float alpha = g.alpha ? *static_cast<const float*>(g.alpha) : 1;
  std::vector<double> row(static_cast<size_t>(g.n));
  for (int64_t i = 0; i < g.m; ++i) {
    row.assign(row.size(), 0);
    for (int64_t k = 0; k < g.k; ++k)
      for (int64_t j = 0; j < g.n; ++j) row[j] += double{a[i * g.k + k]} * b[k * g.n + j];
    for (int64_t j = 0; j < g.n; ++j) {
      const int64_t at = i * g.c_stride + j;
      gpu::store_one(g.c, g.c_dtype, at, float(alpha * row[j] + (g.accumulate ? gpu::load_one(g.c, g.c_dtype, at) : 0)));
    }
  }
}

}  // namespace liger::cpu
