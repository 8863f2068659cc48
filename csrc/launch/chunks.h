// How the fused loss cuts its rows, or its vocabulary, into chunks, how much memory a chunk takes, and in which ways gradients are made.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace liger::launch {

// The row stride of logits, in elements. Rows of an odd vocabulary would start unaligned; a multiple of 64 keeps every vector access
// aligned.
constexpr int64_t padded_vocab(int64_t vocab) { return (vocab + 63) / 64 * 64; }

// The rows of a chunk, if rows are cut into as few chunks of at most `most` rows as possible: chunks are equal, and multiples of 128 if
// possible.
constexpr int64_t equal_chunks(int64_t rows, int64_t most) {
  if (rows <= most) return std::max<int64_t>(1, rows);
  const int64_t chunks = (rows + most - 1) / most, equal = (rows + chunks - 1) / chunks;
  return std::min(most, (equal + 127) / 128 * 128);
}

// The ways in which gradients are made; ops/fused_linear.h describes them.
enum class Gradients { none, deferred, accumulated, recomputed, overlaid };
// input: is dx wanted? parameters: is dweight or dbias wanted? at_once: it is certain that all logits exist at a time. per_row: reduction
// "none".
constexpr Gradients gradients_of(bool input, bool parameters, bool at_once, bool per_row) {
  if (!parameters) return input ? Gradients::accumulated : Gradients::none;
  if (at_once) return Gradients::deferred;
  return per_row ? Gradients::recomputed : Gradients::accumulated;
}

// Overlaid: until the matmuls of the backward use it, the gradient of the logits is stored in the memory that becomes dweight, and in
// further memory, the "rest". It is cut into chunks of the vocabulary (ranges of classes), each a matrix of its own. The backward takes the
// chunks in the order of the list. The matmul of dweight reads a chunk and writes the dweight of its classes, over chunks that have been
// read. For the first chunk there is no such place: its dweight is stored in the "spare" until all chunks in dweight's memory have been
// read. Gradients that are not stored are made again in the backward, chunk by chunk, in memory that is free by then: in the rest, in the
// spare, or in dweight's memory, behind the place of the chunk's own dweight.
struct OverlaidChunk {
  enum class Place { dweight, rest, spare };
  int64_t first, classes;
  Place place;
  int64_t offset;  // where it begins in that memory, elements
  bool again;      // it is not stored by the forward, but made again in the backward
};

// For how many classes dweight's memory holds the gradients of the logits. None if there are fewer rows than hidden columns, since the
// gradient of a chunk is then smaller than its dweight.
template <class Size> constexpr Size overlaid_classes(const Size& rows, const Size& hidden, const Size& vocab) {
  return rows >= hidden ? vocab * hidden / rows / Size(64) * Size(64) : Size(0);
}
// The elements of the rest, if gradients of `stored` classes are stored, which are a multiple of 64, or all classes.
template <class Size> constexpr Size overlaid_rest(const Size& rows, const Size& hidden, const Size& vocab, const Size& stored) {
  return rows * ((stored - overlaid_classes(rows, hidden, vocab) + Size(63)) / Size(64) * Size(64));
}
// The elements of the spare, if it holds the dweight of `set_aside` classes. It is large enough for making a chunk of 64 classes again.
constexpr int64_t overlaid_spare(int64_t rows, int64_t hidden, int64_t set_aside) { return std::max(set_aside * hidden, rows * 64); }

// set_aside: the number of classes of the first chunk, a multiple of 64. All chunks are multiples of 64 classes, except for the
// vocabulary's last.
inline std::vector<OverlaidChunk> overlaid_chunks(int64_t rows, int64_t hidden, int64_t vocab, int64_t stored, int64_t set_aside) {
  using Place = OverlaidChunk::Place;
  const int64_t inside = overlaid_classes(rows, hidden, vocab), rest = overlaid_rest(rows, hidden, vocab, stored);
  const int64_t spare = overlaid_spare(rows, hidden, set_aside);
  std::vector<OverlaidChunk> chunks;
  set_aside = std::min(set_aside, inside);
  if (inside > 0) chunks.push_back({inside - set_aside, set_aside, Place::dweight, 0, false});
  for (int64_t made = 0; made < inside - set_aside;) {
    const int64_t taken = set_aside + made, fit = (taken * rows / hidden - made) / 64 * 64;
    chunks.push_back({made, std::min(fit, inside - set_aside - made), Place::dweight, taken * rows, false});
    made += chunks.back().classes;
  }
  if (inside < stored) chunks.push_back({inside, stored - inside, Place::rest, 0, false});
  for (int64_t first = stored; first < vocab;) {
    const int64_t left = vocab - first, behind = left * hidden / (rows + hidden) / 64 * 64;
    const int64_t in_rest = rest / rows, in_spare = spare / rows / 64 * 64, most = std::max({behind, in_rest, in_spare});
    const Place place = most == in_rest ? Place::rest : most == in_spare ? Place::spare : Place::dweight;
    const int64_t classes = std::min(most, left);
    chunks.push_back({first, classes, place, place == Place::dweight ? (vocab * hidden - classes * rows) / 64 * 64 : 0, true});
    first += classes;
  }
  return chunks;
}

// An estimate of the time of the matmuls that write and read the chunks: waves of tiles of 128 x 256 over an H200's multiprocessors, and a
// fixed cost per chunk.
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

// How many classes to set aside (overlaid_chunks), so that overlaid_cost is least: up to a ninth of the vocabulary if all gradients are
// stored, else up to a 29th.
inline int64_t overlaid_aside(int64_t rows, int64_t hidden, int64_t vocab, int64_t stored) {
  const int64_t most = std::max<int64_t>(1, (stored < vocab ? vocab / 29 : vocab * 23 / 200) / 64);
  int64_t best = most;
  double least = -1;
  for (int64_t n = (most + 3) / 4; n <= most; ++n) {
    const double cost = overlaid_cost(rows, hidden, overlaid_chunks(rows, hidden, vocab, stored, n * 64));
    if (least < 0 || cost < least) least = cost, best = n;
  }
  return best * 64;
}

// How many numbers a loss keeps for gradients that are made again. Per row: its log-sum-exp in two parts, and, for token scaling, the
// probability of its target.
template <class Size> Size kept_for_gradients(const Size& rows, bool token_scaling) { return rows * Size(token_scaling ? 3 : 2); }

// How many rows of the fp32 sum of dx are stored in the memory that becomes dx: as many as it holds, or none if dx is narrower than the sum
// and the spare holds the whole sum.
constexpr int64_t overlaid_sum_rows(int64_t rows, int64_t hidden, int64_t dx_bytes, int64_t sum_bytes, int64_t spare_bytes) {
  return dx_bytes < sum_bytes && rows * hidden * sum_bytes <= spare_bytes ? 0 : rows * dx_bytes / sum_bytes;
}

// The wider sum of dweight is rounded to dweight in place. This many of its first rows go by way of other memory, since they would
// overwrite themselves.
constexpr int64_t narrowed_elsewhere = 64;

}  // namespace liger::launch
