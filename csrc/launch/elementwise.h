// The launches of elementwise ops, of the fused loss's small passes, of sums of partial rows and of copies. `vec`: elements of an access.
#pragma once
#include "launch/launch.h"

namespace liger::launch {

// Tiles of rows (Tiles in gpu/rows.h), `k` vectors to a thread. `contiguous`: there are no gaps between rows, which are one long row then.
Launch row_tiles(const DeviceProfile&, const Kernel& kernel, Tunable, int64_t rows, int64_t cols, int vec, int k, bool contiguous,
                 const Knobs* = nullptr);

constexpr int piece_k = 4;    // vectors that a thread has in flight
constexpr int piece_vec = 8;  // elements of a vector, of any dtype; 1 where rows are not aligned

inline constexpr Kernel scale_kernel("Scale", Instance{piece_threads, 1}, Instance{piece_threads, piece_vec});
inline constexpr Kernel fill_kernel("Fill", Instance{piece_threads, 1}, Instance{piece_threads, piece_vec});
// One of these two. Rows of `scale` are one long row where they have no gaps between them and no factors of their own.
Launch pieces(const DeviceProfile&, const Kernel&, int64_t rows, int64_t cols, int vec);

// partial_rows: of fp32 sums that sum_columns adds up.
inline constexpr Kernel partial_columns_kernel("PartialColumns", Instance{piece_threads, 1}, Instance{piece_threads, piece_vec});
Launch partial_columns(const DeviceProfile&, int64_t rows, int64_t cols, int vec);

// Of two groups of columns.
inline constexpr Kernel sum_columns_kernel("SumColumns", Instance{piece_threads});
Launch sum_columns(const DeviceProfile&, int64_t partial_rows, int64_t first_cols, int64_t second_cols);

// One number of as many factors.
inline constexpr Kernel product_kernel("Product", Instance{row_threads});
Launch product(const DeviceProfile&, int64_t factors);

// k: vectors of a thread.
inline constexpr Kernel stream_copy_kernel("StreamCopyKernel", Instance{piece_threads, none, 1}, Instance{piece_threads, none, 2},
                                           Instance{piece_threads, none, 4}, Instance{piece_threads, none, 8});
Launch stream_copy(const DeviceProfile&, int64_t vectors, int k);

}  // namespace liger::launch
