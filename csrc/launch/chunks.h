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

// Overlaid: the gradient of all logits waits for its matmuls in the memory that becomes dweight, and in a rest beside it, as pieces of the
// vocabulary, each a matrix of its own. The matmul of dweight takes them in this order; what it makes of a piece lies where earlier ones
// were. Only the first piece's has no such place: it is set aside until all have been taken.
struct OverlaidPiece {
  int64_t first, classes;
  int64_t offset;    // elements, in dweight's memory or the rest
  bool in_dweight;
};

// How many classes' gradients dweight's memory holds, and the elements of the others' gradients: the rest. rows >= hidden.
template <class Size> constexpr Size overlaid_classes(const Size& rows, const Size& hidden, const Size& vocab) {
  return vocab * hidden / rows / Size(64) * Size(64);
}
template <class Size> constexpr Size overlaid_rest(const Size& rows, const Size& hidden, const Size& vocab) {
  return rows * ((vocab - overlaid_classes(rows, hidden, vocab) + Size(63)) / Size(64) * Size(64));
}

// set_aside: classes of the first piece. A multiple of 64, as the others are but for the vocabulary's last.
inline std::vector<OverlaidPiece> overlaid_pieces(int64_t rows, int64_t hidden, int64_t vocab, int64_t set_aside) {
  const int64_t inside = overlaid_classes(rows, hidden, vocab);
  std::vector<OverlaidPiece> pieces;
  set_aside = std::min(set_aside, inside);
  if (inside > 0) pieces.push_back({inside - set_aside, set_aside, 0, true});
  for (int64_t made = 0; made < inside - set_aside;) {
    const int64_t taken = set_aside + made, fit = (taken * rows / hidden - made) / 64 * 64;
    pieces.push_back({made, std::min(fit, inside - set_aside - made), taken * rows, true});
    made += pieces.back().classes;
  }
  if (inside < vocab) pieces.push_back({inside, vocab - inside, 0, false});
  return pieces;
}

// As few pieces as there are if a ninth of dweight may be set aside, with the least set aside.
inline std::vector<OverlaidPiece> overlaid_pieces(int64_t rows, int64_t hidden, int64_t vocab) {
  int64_t most = std::max<int64_t>(1, vocab / 9 / 64), least = 1;
  const size_t fewest = overlaid_pieces(rows, hidden, vocab, most * 64).size();
  while (least < most) {
    const int64_t middle = (least + most) / 2;
    if (overlaid_pieces(rows, hidden, vocab, middle * 64).size() > fewest) least = middle + 1;
    else most = middle;
  }
  return overlaid_pieces(rows, hidden, vocab, least * 64);
}

// Rows of dx that are summed at a time, in the memory of what is set aside. wide: elements that one of the accumulator takes.
constexpr int64_t overlaid_block(int64_t rows, int64_t set_aside, int64_t wide) {
  return equal_chunks(rows, std::max(std::min<int64_t>(rows, 128), set_aside / wide));
}

// A sum of dweight becomes dweight in its own memory: so many of its first rows by way of other memory.
constexpr int64_t narrowed_elsewhere = 64;

}  // namespace liger::launch
