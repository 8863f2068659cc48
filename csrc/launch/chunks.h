// How the fused loss cuts its rows into chunks, how much a chunk's buffer holds, and its ways to the gradients.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace liger::launch {

// 16-bit rows of an odd vocabulary would start unaligned; a row stride of whole 64 elements keeps every vector access aligned.
constexpr int64_t padded_vocab(int64_t vocab) { return (vocab + 63) / 64 * 64; }

// Rows of each of the fewest chunks of at most `most` rows: equal, and multiples of 128 where that is possible.
constexpr int64_t equal_chunks(int64_t rows, int64_t most) {
  if (rows <= most) return std::max<int64_t>(1, rows);
  const int64_t chunks = (rows + most - 1) / most, equal = (rows + chunks - 1) / chunks;
  return std::min(most, (equal + 127) / 128 * 128);
}

// What ops/fused_linear.h says of them.
enum class Gradients { none, deferred, accumulated, recomputed, overlaid };
// input, parameters: is dx wanted, is dweight or dbias? at_once: all logits exist at a time, for certain. per_row: reduction "none".
constexpr Gradients gradients_of(bool input, bool parameters, bool at_once, bool per_row) {
  if (!parameters) return input ? Gradients::accumulated : Gradients::none;
  if (at_once) return Gradients::deferred;
  return per_row ? Gradients::recomputed : Gradients::accumulated;
}

// Overlaid: the gradient of the logits waits for its matmuls in the memory that becomes dweight, and in a rest beside it, as pieces of
// the vocabulary, each a matrix of its own. The matmul of dweight takes them in this order; what it makes of a piece lies where earlier
// ones were. Only the first piece's has no such place: it is set aside, in a spare, until all in that memory have been taken.
// What is not stored is made again in the backward, piece by piece, in memory that is free by then: in the rest, in the spare, or in
// dweight's own, behind what the piece becomes.
struct OverlaidPiece {
  enum class Place { dweight, rest, spare };
  int64_t first, classes;
  Place place;
  int64_t offset;  // elements, in that memory
  bool again;      // made in the backward
};

// How many classes' gradients dweight's memory holds; of fewer rows than columns none, for there a piece is smaller than its dweight.
template <class Size> constexpr Size overlaid_classes(const Size& rows, const Size& hidden, const Size& vocab) {
  return rows >= hidden ? vocab * hidden / rows / Size(64) * Size(64) : Size(0);
}
// Elements of the rest, for the gradients of `stored` classes: a multiple of 64, or all.
template <class Size> constexpr Size overlaid_rest(const Size& rows, const Size& hidden, const Size& vocab, const Size& stored) {
  return rows * ((stored - overlaid_classes(rows, hidden, vocab) + Size(63)) / Size(64) * Size(64));
}
// Elements of the spare, of which so many classes' dweight is set aside. A piece of 64 classes can be made again in it.
constexpr int64_t overlaid_spare(int64_t rows, int64_t hidden, int64_t set_aside) { return std::max(set_aside * hidden, rows * 64); }

// set_aside: classes of the first piece, a multiple of 64. All pieces are that but for the vocabulary's last.
inline std::vector<OverlaidPiece> overlaid_pieces(int64_t rows, int64_t hidden, int64_t vocab, int64_t stored, int64_t set_aside) {
  using Place = OverlaidPiece::Place;
  const int64_t inside = overlaid_classes(rows, hidden, vocab), rest = overlaid_rest(rows, hidden, vocab, stored);
  const int64_t spare = overlaid_spare(rows, hidden, set_aside);
  std::vector<OverlaidPiece> pieces;
  set_aside = std::min(set_aside, inside);
  if (inside > 0) pieces.push_back({inside - set_aside, set_aside, Place::dweight, 0, false});
  for (int64_t made = 0; made < inside - set_aside;) {
    const int64_t taken = set_aside + made, fit = (taken * rows / hidden - made) / 64 * 64;
    pieces.push_back({made, std::min(fit, inside - set_aside - made), Place::dweight, taken * rows, false});
    made += pieces.back().classes;
  }
  if (inside < stored) pieces.push_back({inside, stored - inside, Place::rest, 0, false});
  for (int64_t first = stored; first < vocab;) {
    const int64_t left = vocab - first, behind = left * hidden / (rows + hidden) / 64 * 64;
    const int64_t in_rest = rest / rows, in_spare = spare / rows / 64 * 64, most = std::max({behind, in_rest, in_spare});
    const Place place = most == in_rest ? Place::rest : most == in_spare ? Place::spare : Place::dweight;
    const int64_t classes = std::min(most, left);
    pieces.push_back({first, classes, place, place == Place::dweight ? (vocab * hidden - classes * rows) / 64 * 64 : 0, true});
    first += classes;
  }
  return pieces;
}

// Waves of an H200's multiprocessors in the matmuls that make the pieces and take them, in the usual tiles; and what a piece costs beside.
inline double overlaid_cost(int64_t rows, int64_t hidden, const std::vector<OverlaidPiece>& pieces) {
  constexpr int64_t multiprocessors = 132, tile_rows = 128, tile_cols = 256;
  const auto waves = [](int64_t a, int64_t b) {
    const int64_t tiles = ((a + tile_rows - 1) / tile_rows) * ((b + tile_cols - 1) / tile_cols);
    return double((tiles + multiprocessors - 1) / multiprocessors);
  };
  double cost = 0, vocab = 0;
  for (const OverlaidPiece& piece : pieces) {
    cost += waves(piece.classes, hidden) * double(rows) + waves(piece.classes, rows) * double(hidden);
    vocab += double(piece.classes);
  }
  const double all = 2 * vocab * double(hidden) * double(rows) / double(tile_rows * tile_cols * multiprocessors);
  return cost + 0.003 * all * double(pieces.size());
}

// Classes to be set aside: up to a ninth of the vocabulary, where all gradients are stored, else up to a 29th.
inline int64_t overlaid_aside(int64_t rows, int64_t hidden, int64_t vocab, int64_t stored) {
  const int64_t most = std::max<int64_t>(1, (stored < vocab ? vocab / 29 : vocab * 23 / 200) / 64);
  int64_t best = most;
  double least = -1;
  for (int64_t n = (most + 3) / 4; n <= most; ++n) {
    const double cost = overlaid_cost(rows, hidden, overlaid_pieces(rows, hidden, vocab, stored, n * 64));
    if (least < 0 || cost < least) least = cost, best = n;
  }
  return best * 64;
}

// What a loss keeps of each row for gradients that are made again: its log-sum-exp in two parts, and the probability of its target.
template <class Size> Size kept_for_gradients(const Size& rows, bool token_scaling) { return rows * Size(token_scaling ? 3 : 2); }

// How many rows of dx's sum lie in the memory that becomes dx, as many as it holds: none if the spare holds all, or dx is as wide.
constexpr int64_t overlaid_sum_rows(int64_t rows, int64_t hidden, int64_t dx_bytes, int64_t sum_bytes, int64_t spare_bytes) {
  return dx_bytes < sum_bytes && rows * hidden * sum_bytes <= spare_bytes ? 0 : rows * dx_bytes / sum_bytes;
}

// A sum of dweight becomes dweight in its own memory: so many of its first rows by way of other memory.
constexpr int64_t narrowed_elsewhere = 64;

}  // namespace liger::launch
