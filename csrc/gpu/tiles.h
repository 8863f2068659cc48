// Tiles for elementwise kernels: a block processes one tile of a row, or of each of a few short rows, with K vectors per thread. Successive
// blocks process successive tiles in memory, as in a copy. launch::row_tiles computes the launches.
#pragma once
#include "gpu/rows.h"

namespace liger::gpu {

// Arguments of every kernel that works on tiles.
struct Tiles {
  int threads_per_row;
  int64_t rows, cols, per_row;  // per_row: tiles of a row

  explicit Tiles(const launch::Launch& config)
      : threads_per_row(config.plan.threads_per_row),
        rows(config.rows),
        cols(config.cols),
        per_row(launch::ceil_div(cols, int64_t{threads_per_row} * config.plan.k * config.instance.vec)) {}
};

// The elements of a row that a thread has loaded: its vectors, and its single element (RowTile).
template <class T, int VEC, int K> struct TileValues {
  Packed<T, VEC> vectors[K] = {};
  Packed<T, 1> single = {};
};

// A thread's part of a tile of a row that may begin at any address and have any length: up to K of the row's whole vectors and, if this is
// the row's last tile, at most one of the single elements before and behind them (RowParts in rows.h).
template <int VEC, int K> struct RowTile {
  int head;  // elements before the first vector; `columns` counts from there
  Columns<VEC, K> columns;
  int64_t single;  // the column of the single element, or -1

  template <Hint H = Hint::keep, class T> LIGER_DEVICE void load(TileValues<T, VEC, K>& out, const T* row) const {
    columns.template load<H>(out.vectors, row + head);
    if (single >= 0) gpu::load(out.single, row + single);
  }
  // Calls f(vector, column) with each vector, and with the single element as a vector of one. With two `values` the call is f(vector, other
  // vector, column).
  template <class F, class... Values> LIGER_DEVICE void for_each(F f, Values&... values) const {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (columns.has(k)) f(values.vectors[k]..., head + columns.first + k * columns.step);
    if (single >= 0) f(values.single..., single);
  }
};

// A thread's position: its row, which may lie past the last one, the tile of that row, and its place in the tile.
template <int VEC, int K> struct Tile {
  const Tiles& tiles;
  int64_t number, row;  // number: the tile's number in its row
  int index;

  LIGER_DEVICE explicit Tile(const Tiles& tiles) : tiles(tiles) {
    const int64_t line = quotient(block_id(), tiles.per_row);
    number = block_id() - line * tiles.per_row;
    row = line * (block_threads() / tiles.threads_per_row) + thread_id() / tiles.threads_per_row;
    index = thread_id() & (tiles.threads_per_row - 1);
  }
  LIGER_DEVICE bool live() const { return row < tiles.rows; }
  // The thread's columns, if rows are whole vectors.
  LIGER_DEVICE Columns<VEC, K> columns() const { return {index, tiles.threads_per_row, begin(), live() ? tiles.cols : 0}; }
  // The same, where every `lanes` neighbouring threads, a power of two, own successive columns.
  LIGER_DEVICE Columns<VEC, K> columns(int lanes) const {
    const int group = lanes < tiles.threads_per_row ? lanes : tiles.threads_per_row, lane = index & (group - 1);
    return {lane, group, begin() + int64_t{index - lane} * K * VEC, live() ? tiles.cols : 0};
  }
  // The thread's part of a row of any length, of which `head` elements lie before the first vector.
  LIGER_DEVICE RowTile<VEC, K> part(int head) const {
    const int64_t whole = (tiles.cols - head) / VEC * VEC, single = index < head ? index : whole + index;
    const bool has_single = VEC > 1 && number == tiles.per_row - 1 && single < tiles.cols;
    return {head, {index, tiles.threads_per_row, begin(), whole}, has_single ? single : -1};
  }

 private:
  LIGER_DEVICE int64_t begin() const { return number * tiles.threads_per_row * K * VEC; }
};

}  // namespace liger::gpu
