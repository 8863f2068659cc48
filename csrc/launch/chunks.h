// How the fused loss cuts its rows into chunks, how much a chunk's buffer holds, and its ways to the gradients.
#pragma once
#include <algorithm>
#include <cstdint>

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
enum class Gradients { none, deferred, accumulated, recomputed };
// input, parameters: is dx wanted, is dweight or dbias? at_once: all logits exist at a time, for certain. per_row: reduction "none".
constexpr Gradients gradients_of(bool input, bool parameters, bool at_once, bool per_row) {
  if (!parameters) return input ? Gradients::accumulated : Gradients::none;
  if (at_once) return Gradients::deferred;
  return per_row ? Gradients::recomputed : Gradients::accumulated;
}

}  // namespace liger::launch
