// The backward of the norms for few rows, whose tensors mostly fit in the L2: one kernel computes dz, dweight and dbias.
//
// The sums need no reduction over a row, only rstd and mean, which the forward saved. So the first blocks sum narrow tiles of columns over
// all rows, and the others compute dz row by row (norm_backward_rows.h). dy and z are read twice, but no block waits for another, and there
// are no partial rows for a second kernel to add up. The start of a second kernel would take as long as the work itself.
#pragma once
#include "gpu/norm_backward_rows.h"

namespace liger::gpu {

// Tile: vectors of a row of a tile, one per thread.
template <class T, int VEC, int K, int Tile, bool Centered> struct NormBackwardFew {
  using Args = NormBackwardArgs;
  static constexpr int max_threads = launch::norm_backward_few.instance(VEC, K, Tile).max_threads;
  // With two vectors per thread 64 registers are enough, and two blocks of 512 threads fit on a multiprocessor; with four vectors a thread
  // may have as many registers as there are.
  static constexpr int min_blocks = K == 2 ? 2 : 1;

  static LIGER_DEVICE void run(const Args& a) {
    // Blocks of tiles start first, since each of them has more work than a block of rows.
    if (block_id() < a.tile_blocks) return sum_tile(a, block_id());
    if (a.dz.data) norm_backward_row<T, VEC, K, Centered, float[VEC]>(a, a.tile_blocks);
  }

 private:
  static constexpr int vectors = Tile, at_once = Centered ? 2 : 4;  // vectors: of a tile's row; at_once: rows whose loads are in flight
  // Sums a tile. Neighbouring threads own the tile's vectors of one row, and the next threads the vectors of the next row. Each thread sums
  // its vector of every `lines`th row. The sums are then added up within each warp by shuffles, and across warps in shared memory.
  static LIGER_DEVICE void sum_tile(const Args& a, int64_t tile) {
    const int vector = thread_id() & (vectors - 1), line = thread_id() / vectors, lines = block_threads() / vectors;
    const int64_t column = (tile * vectors + vector) * VEC;
    const int64_t rows = column < a.cols ? a.rows : 0;
    float sums[Centered ? 2 : 1][VEC] = {};
    for (int64_t first = line; first < rows; first += at_once * lines) {
      Packed<T, VEC> dy[at_once] = {}, z[at_once] = {};
      float mean[at_once] = {}, rstd[at_once] = {};
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int64_t row = first + k * lines;
        if (row >= rows) continue;
        load<Hint::constant>(dy[k], static_cast<const T*>(a.dy.data) + (row * a.dy.stride + column));
        load<Hint::constant>(z[k], static_cast<const T*>(a.z.data) + (row * a.z.stride + column));
        rstd[k] = a.rstd[row];
        if constexpr (Centered) mean[k] = a.mean[row];
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          sums[0][i] += dy[k][i] * ((Centered ? z[k][i] - mean[k] : z[k][i]) * rstd[k]);
          if constexpr (Centered) sums[1][i] += dy[k][i];
        }
    }
    for (int mask = warp_width() / 2; mask >= vectors; mask /= 2)
#pragma unroll
      for (auto& values : sums)
#pragma unroll
        for (int i = 0; i < VEC; ++i) values[i] += shfl_xor(values[i], mask);
    constexpr int width = vectors * VEC, sets = Centered ? 2 : 1;
    const Shared<float> all = shared<float>(0);  // [warps][sets][width]
    if (lane_id() < vectors)
#pragma unroll
      for (int n = 0; n < sets; ++n)
        store(&all[(warp_id() * sets + n) * width + vector * VEC], reinterpret_cast<const Vec<float, VEC>&>(sums[n]));
    block_barrier();
    for (int at = thread_id(); at < sets * width; at += block_threads()) {
      const MutableVector& to = at < width ? a.dweight : a.dbias;
      const int64_t col = tile * width + at % width;
      if (to.data == nullptr || col >= a.cols) continue;
      ExactSum total;
      for (int warp = 0; warp < block_threads() / warp_width(); ++warp) total.add(all[warp * sets * width + at]);
      store_one(to.data, to.dtype, col, total.total());
    }
  }
};

}  // namespace liger::gpu
