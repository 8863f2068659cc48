// How the fused loss cuts its logits into chunks, and where it stores their gradient:
// - the number of rows of a chunk (equal_chunks);
// - the strategies for computing gradients (Gradients), and the choice of a strategy for a call (gradient_strategy);
// - the memory layout of the strategy `overlaid`, which stores chunks of the gradient of the logits in the memory that becomes dweight.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace liger::launch {

// The row stride of logits, in elements. Rows of an odd vocabulary would start unaligned; a multiple of 64 keeps every vector access
// aligned.
constexpr int64_t padded_vocab(int64_t vocab) { return (vocab + 63) / 64 * 64; }

// The rows of a chunk, if `rows` rows are cut into as few chunks of at most `most` rows as possible. Chunks are equal, and multiples of 128
// rows if possible; the last one may be shorter.
constexpr int64_t equal_chunks(int64_t rows, int64_t most) {
  if (rows <= most) return std::max<int64_t>(1, rows);
  const int64_t chunks = (rows + most - 1) / most, equal = (rows + chunks - 1) / chunks;
  return std::min(most, (equal + 127) / 128 * 128);
}

// The strategies for computing gradients; ops/fused_linear.h describes them.
enum class Gradients { none, deferred, accumulated, recomputed, overlaid };
// The strategy of a call. input: dx is requested. parameters: dweight or dbias is requested. at_once: true if all logits exist at a time
// (one chunk); false also if the number of chunks is unknown, as in a compiled graph. per_row: reduction "none".
constexpr Gradients gradient_strategy(bool input, bool parameters, bool at_once, bool per_row) {
  if (!parameters) return input ? Gradients::accumulated : Gradients::none;
  if (at_once) return Gradients::deferred;
  return per_row ? Gradients::recomputed : Gradients::accumulated;
}

// Overlaid: between forward and backward, the gradient of the logits lies in memory that the backward overwrites by dweight, and in an
// overflow buffer (the "rest"). The gradient is cut into chunks of the vocabulary (ranges of classes); each chunk is a matrix. The backward
// processes the chunks in the order of the list OverlaidLayout::chunks. For each chunk, a matmul reads the gradient and writes dweight of
// the chunk's classes, over the gradients of chunks that earlier matmuls have read. No memory is free for the first chunk's dweight: a
// workspace (the "spare") holds it until all chunks in dweight's memory have been read. The forward may store the gradient of some classes
// only. The backward recomputes the gradient of the other classes, chunk by chunk, in memory that is free by then: in the rest, in the
// spare, or in dweight's memory, behind the chunk's own dweight.
//
// Sizes are in elements of the gradient. `room` is the space of one class's dweight: hidden_size, or twice that if dweight is in fp32 and
// the gradient in 16 bits.
struct OverlaidChunk {
  enum class Place { dweight, rest, spare };
  int64_t first, classes;
  Place place;
  int64_t offset;  // where the chunk begins in that memory
  bool again;      // the forward does not store the gradient; the backward recomputes it
};

// The number of classes whose gradients fit into dweight's memory: all classes if there are fewer rows than `room` (but none if the padding
// of the vocabulary's last chunk does not fit, which is rare).
template <class Size> constexpr Size overlaid_classes(const Size& rows, const Size& room, const Size& vocab) {
  if (rows >= room) return vocab * room / rows / Size(64) * Size(64);
  return (vocab + Size(63)) / Size(64) * Size(64) * rows <= vocab * room ? vocab : Size(0);
}
// The size of the rest. `stored`: the number of classes whose gradients the forward stores, a multiple of 64 or all classes.
template <class Size> constexpr Size overlaid_rest(const Size& rows, const Size& room, const Size& vocab, const Size& stored) {
  return rows * ((stored - overlaid_classes(rows, room, vocab) + Size(63)) / Size(64) * Size(64));
}
// The chunk size, in classes, with which the forward computes the statistics of classes that it does not store. A chunk's logits lie in
// dweight's memory.
constexpr int64_t overlaid_statistics_classes(int64_t rows, int64_t room, int64_t vocab) {
  return std::max<int64_t>(64, vocab * room / std::max<int64_t>(1, rows) / 64 * 64);
}

struct OverlaidLayout {
  std::vector<OverlaidChunk> chunks;
  int64_t spare;  // the size of the spare: the dweight of the first chunk, and at least the gradient of 64 classes
};

// first_chunk_classes: the size of the first chunk, in classes; rounding may increase it. All chunks are multiples of 64 classes, except
// for the vocabulary's last one.
inline OverlaidLayout overlaid_layout(int64_t rows, int64_t room, int64_t vocab, int64_t stored, int64_t first_chunk_classes) {
  using Place = OverlaidChunk::Place;
  const int64_t inside = overlaid_classes(rows, room, vocab), rest = overlaid_rest(rows, room, vocab, stored);
  // Classes in dweight's memory besides the first chunk. With fewer rows than room, rounding may cost the space of up to 64 classes.
  const int64_t others = std::max<int64_t>(0, inside - std::max<int64_t>(first_chunk_classes, rows < room ? 128 : 64)) / 64 * 64;
  OverlaidLayout layout;
  layout.spare = std::max((inside > 0 ? inside - others : 0) * room, rows * 64);
  if (inside > 0) layout.chunks.push_back({others, inside - others, Place::dweight, 0, false});
  // These lie at the end of the memory, so that as much as possible is free in front of them.
  const int64_t begin = (vocab * room - others * rows) / 64 * 64;
  for (int64_t done = 0; done < others;) {
    const int64_t offset = begin + done * rows, fit = (offset / room - done) / 64 * 64;
    if (fit < 64) throw std::logic_error("a chunk of the fused loss has no place");
    layout.chunks.push_back({done, std::min(fit, others - done), Place::dweight, offset, false});
    done += layout.chunks.back().classes;
  }
  if (inside < stored) layout.chunks.push_back({inside, stored - inside, Place::rest, 0, false});
  for (int64_t first = stored; first < vocab;) {
    const int64_t left = vocab - first, behind = left * room / (rows + room) / 64 * 64;
    const int64_t in_rest = rest / rows, in_spare = layout.spare / rows / 64 * 64, most = std::max({behind, in_rest, in_spare});
    const Place place = most == in_rest ? Place::rest : most == in_spare ? Place::spare : Place::dweight;
    const int64_t classes = std::min(most, left);
    layout.chunks.push_back({first, classes, place, place == Place::dweight ? (vocab * room - classes * rows) / 64 * 64 : 0, true});
    first += classes;
  }
  return layout;
}

// An estimate of the relative time of the matmuls that write and read the chunks: the waves of tiles of 128 x 256 on an H200's
// multiprocessors, and a fixed cost per chunk.
inline double overlaid_cost(int64_t rows, int64_t hidden, const std::vector<OverlaidChunk>& chunks) {
  constexpr int64_t multiprocessors = 132, tile_rows = 128, tile_cols = 256;
  const auto waves = [](int64_t a, int64_t b) {
    const int64_t tiles = ((a + tile_rows - 1) / tile_rows) * ((b + tile_cols - 1) / tile_cols);
    return double((tiles + multiprocessors - 1) / multiprocessors);
  };
  double cost = 0, vocab = 0;
  for (const OverlaidChunk& chunk : chunks) {
    cost += waves(chunk.classes, hidden) * double(rows) + waves(chunk.classes, rows) * double(hidden);
    vocab += double(chunk.classes);
  }
  const double all = 2 * vocab * double(hidden) * double(rows) / double(tile_rows * tile_cols * multiprocessors);
  return cost + 0.003 * all * double(chunks.size());
}

// Returns the layout with about the least overlaid_cost. Its first chunk has at most about 11.5 % of the vocabulary if all gradients are
// stored, else at most 1/29. Each thread caches its last result, because the calls of a training step often pass the same arguments.
inline OverlaidLayout best_overlaid_layout(int64_t rows, int64_t room, int64_t hidden, int64_t vocab, int64_t stored) {
  using Asked = std::array<int64_t, 5>;
  static thread_local Asked last{};
  static thread_local OverlaidLayout best;
  const Asked asked{rows, room, hidden, vocab, stored};
  if (last == asked) return best;
  constexpr int64_t tried = 12;  // up to about twice this many sizes are compared
  constexpr double as_good = 1.004;  // the smallest size whose cost is at most this times the least cost is chosen
  const int64_t most = std::max<int64_t>(1, (stored < vocab ? vocab / 29 : vocab * 23 / 200) / 64), least = (most + 3) / 4;
  const int64_t step = std::max<int64_t>(1, (most - least) / tried);
  std::vector<OverlaidLayout> layouts;
  std::vector<double> costs;
  for (int64_t n = least + (most - least) % step; n <= most; n += step) {
    layouts.push_back(overlaid_layout(rows, room, vocab, stored, n * 64));
    costs.push_back(overlaid_cost(rows, hidden, layouts.back().chunks));
  }
  const double least_cost = *std::ranges::min_element(costs);
  const auto chosen = std::ranges::find_if(costs, [&](double cost) { return cost <= as_good * least_cost; });
  best = std::move(layouts[size_t(chosen - costs.begin())]);
  last = asked;
  return best;
}

// The number of values that the forward saves for gradients that the backward recomputes. Per row: the log-sum-exp in two parts, and, for
// token scaling, the probability of the target.
template <class Size> Size gradient_state_size(const Size& rows, bool token_scaling) { return rows * Size(token_scaling ? 3 : 2); }

// The number of rows of the sum of dx (dtype of the accumulator) that the memory of dx holds; 0 if dx is narrower than the sum and the
// spare holds the whole sum.
constexpr int64_t overlaid_sum_rows(int64_t rows, int64_t hidden, int64_t dx_bytes, int64_t sum_bytes, int64_t spare_bytes) {
  return dx_bytes < sum_bytes && rows * hidden * sum_bytes <= spare_bytes ? 0 : rows * dx_bytes / sum_bytes;
}

// An fp32 sum is rounded to a 16-bit dweight or dx in place (ops/row_sum.cpp). The first rows would overwrite themselves, so this many of
// them go through a scratch buffer.
constexpr int64_t first_narrowed_rows = 64;

}  // namespace liger::launch
