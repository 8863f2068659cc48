// How the fused loss cuts its rows, or its vocabulary, into chunks, how much memory a chunk takes, and in which ways gradients are made.
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
// read. Gradients that are not stored are recomputed in the backward, chunk by chunk, in memory that is free by then: in the rest, in the
// spare, or in dweight's memory, behind the place of the chunk's own dweight.
//
// Sizes are in elements of the gradient. `room` is the room that dweight has for each class: hidden_size, or twice that if dweight is in
// fp32 and the gradient in 16 bits.
struct OverlaidChunk {
  enum class Place { dweight, rest, spare };
  int64_t first, classes;
  Place place;
  int64_t offset;  // where it begins in that memory
  bool again;      // it is not stored by the forward, but recomputed in the backward
};

// For how many classes dweight's memory holds the gradients of the logits: all of them if there are fewer rows than `room` (none in the
// rare case that the padding of the vocabulary's last chunk does not fit).
template <class Size> constexpr Size overlaid_classes(const Size& rows, const Size& room, const Size& vocab) {
  if (rows >= room) return vocab * room / rows / Size(64) * Size(64);
  return (vocab + Size(63)) / Size(64) * Size(64) * rows <= vocab * room ? vocab : Size(0);
}
// The size of the rest, if gradients of `stored` classes are stored, which are a multiple of 64, or all classes.
template <class Size> constexpr Size overlaid_rest(const Size& rows, const Size& room, const Size& vocab, const Size& stored) {
  return rows * ((stored - overlaid_classes(rows, room, vocab) + Size(63)) / Size(64) * Size(64));
}
// How many classes that are not stored have their logits at a time in dweight's memory, when the forward computes their statistics.
constexpr int64_t overlaid_at_a_time(int64_t rows, int64_t room, int64_t vocab) {
  return std::max<int64_t>(64, vocab * room / std::max<int64_t>(1, rows) / 64 * 64);
}

struct OverlaidLayout {
  std::vector<OverlaidChunk> chunks;
  int64_t spare;  // its size: the dweight of the first chunk, and at least the gradient of 64 classes
};

// set_aside: the size of the first chunk, in classes. All chunks are multiples of 64 classes, except for the vocabulary's last.
inline OverlaidLayout overlaid_layout(int64_t rows, int64_t room, int64_t vocab, int64_t stored, int64_t set_aside) {
  using Place = OverlaidChunk::Place;
  const int64_t inside = overlaid_classes(rows, room, vocab), rest = overlaid_rest(rows, room, vocab, stored);
  // Classes in dweight's memory beside the first chunk. With fewer rows than room, rounding may cost them up to 64 classes of space.
  const int64_t others = std::max<int64_t>(0, inside - std::max<int64_t>(set_aside, rows < room ? 128 : 64)) / 64 * 64;
  OverlaidLayout made;
  made.spare = std::max((inside > 0 ? inside - others : 0) * room, rows * 64);
  if (inside > 0) made.chunks.push_back({others, inside - others, Place::dweight, 0, false});
  // The others lie at the end of the memory, so that as much as possible is free in front of them.
  const int64_t begin = (vocab * room - others * rows) / 64 * 64;
  for (int64_t done = 0; done < others;) {
    const int64_t offset = begin + done * rows, fit = (offset / room - done) / 64 * 64;
    if (fit < 64) throw std::logic_error("a chunk of the fused loss has no place");
    made.chunks.push_back({done, std::min(fit, others - done), Place::dweight, offset, false});
    done += made.chunks.back().classes;
  }
  if (inside < stored) made.chunks.push_back({inside, stored - inside, Place::rest, 0, false});
  for (int64_t first = stored; first < vocab;) {
    const int64_t left = vocab - first, behind = left * room / (rows + room) / 64 * 64;
    const int64_t in_rest = rest / rows, in_spare = made.spare / rows / 64 * 64, most = std::max({behind, in_rest, in_spare});
    const Place place = most == in_rest ? Place::rest : most == in_spare ? Place::spare : Place::dweight;
    const int64_t classes = std::min(most, left);
    made.chunks.push_back({first, classes, place, place == Place::dweight ? (vocab * room - classes * rows) / 64 * 64 : 0, true});
    first += classes;
  }
  return made;
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

// The layout whose first chunk has the size for which overlaid_cost is least: up to a ninth of the vocabulary if all gradients are stored,
// else up to a 29th. The last result is kept, since a forward and its backward ask for the same.
inline OverlaidLayout best_overlaid_layout(int64_t rows, int64_t room, int64_t hidden, int64_t vocab, int64_t stored) {
  using Asked = std::array<int64_t, 5>;
  static thread_local Asked last{};
  static thread_local OverlaidLayout best;
  const Asked asked{rows, room, hidden, vocab, stored};
  if (last == asked) return best;
  constexpr int64_t tried = 12;  // sizes
  constexpr double as_good = 1.004;  // the smallest size of those that are within this of the least cost
  const int64_t most = std::max<int64_t>(1, (stored < vocab ? vocab / 29 : vocab * 23 / 200) / 64), least = (most + 3) / 4;
  const int64_t step = std::max<int64_t>(1, (most - least) / tried);
  std::vector<OverlaidLayout> made;
  std::vector<double> costs;
  for (int64_t n = least + (most - least) % step; n <= most; n += step) {
    made.push_back(overlaid_layout(rows, room, vocab, stored, n * 64));
    costs.push_back(overlaid_cost(rows, hidden, made.back().chunks));
  }
  const double least_cost = *std::ranges::min_element(costs);
  const auto chosen = std::ranges::find_if(costs, [&](double cost) { return cost <= as_good * least_cost; });
  best = std::move(made[size_t(chosen - costs.begin())]);
  last = asked;
  return best;
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
