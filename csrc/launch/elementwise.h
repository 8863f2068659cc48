// Plans the launches of elementwise work on rows, which csrc/gpu executes (launch.h). Also lists the kernel instances of three kinds of
// kernels and plans their launches: the fused loss's small passes (kernels/elementwise.h), column sums, and copies. `vec`: elements per
// access.
#pragma once
#include "kernels/stream_copy.h"
#include "launch/launch.h"

namespace liger::launch {

// Elementwise work on the rows of a matrix, in tiles (gpu/tiles.h) with `k` vectors per thread.
struct TiledRows {
  int64_t rows, cols;
  int vec, k;
  bool edges = false;  // rows may have single elements before the first and behind the last whole vector
  bool contiguous = false;  // no gaps between rows: the matrix is processed as one long row
};
Launch row_tiles(const DeviceProfile&, const Kernel& kernel, const TiledRows&, Tunable = {}, const Knobs* = nullptr);

// The fused loss's small passes over matrices.
constexpr int matrix_k = 4;    // vectors that a thread loads before it uses the first one
constexpr int matrix_vec = 8;  // elements of a vector of any dtype, where rows are aligned; otherwise 1
inline constexpr Kernel scale_kernel("Scale", Instance{independent_threads, 1}, Instance{independent_threads, matrix_vec});
inline constexpr Kernel fill_kernel("Fill", Instance{independent_threads, 1}, Instance{independent_threads, matrix_vec});
inline TiledRows tiled_matrix(int64_t rows, int64_t cols, int vec, bool contiguous = false) {
  return {rows, cols, vec, matrix_k, true, contiguous};
}

// Column sums over ranges of rows: plan.partial_rows rows of fp32 sums, which sum_columns adds up.
inline constexpr Kernel partial_columns_kernel("PartialColumns", Instance{independent_threads, 1},
                                               Instance{independent_threads, matrix_vec});
Launch partial_columns(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// Adds up partial rows, whose columns come in two groups (dweight's and dbias's).
inline constexpr Kernel sum_columns_kernel("SumColumns", Instance{independent_threads, 1}, Instance{independent_threads, 4});
Launch sum_columns(const DeviceProfile&, int64_t partial_rows, int64_t first_cols, int64_t second_cols);

// The kernel of scalar_product() (kernels/elementwise.h), one block. factors: the number of ScalarProduct::factors, 1 if there are none.
inline constexpr Kernel product_kernel("Product", Instance{row_threads});
Launch product(const DeviceProfile&, int64_t factors);

// k: vectors per thread, StreamCopy::per_thread.
inline constexpr Kernel stream_copy_kernel("StreamCopyKernel", Instance{independent_threads, none, 1},
                                           Instance{independent_threads, none, 2}, Instance{independent_threads, none, 4},
                                           Instance{independent_threads, none, 8});
Launch op_launch(const DeviceProfile&, const StreamCopy&);

}  // namespace liger::launch
