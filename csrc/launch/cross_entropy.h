// The launches of cross entropy and of the fused loss's kernel for rows of logits.
#pragma once
#include <optional>

#include "launch/launch.h"

namespace liger::launch {

constexpr int logits_threads = 512;  // the most threads of a block that processes rows of logits
constexpr int logits_row_threads = 128;  // threads of a block that has a single row, if there are enough rows to fill the device

// How many vectors a thread loads before it uses the first one: in kernels over rows, fewer if options need the registers; in the
// backward's tiles.
constexpr int logits_in_flight(bool full) { return full ? 2 : 4; }
constexpr int logit_tile_k(int vec) { return vec == 1 ? 2 : 4; }

struct LogitsShape {
  int64_t rows, vocab;
  int element_bytes, vec;  // vec: elements per access
  bool full = false;  // there are options that cost instructions per element
};
// Is this instance compiled for calls with such options (full), or without?
constexpr bool logits_have(bool full, const Instance& of) { return full ? of.threads <= 0 : of.vec > 1; }

// threads: the threads of a row's block, if the compiler knows them; 0: the plan says it. after_counts: the launch depends on no earlier
// kernel but the one that counts targets.
inline constexpr Kernel cross_entropy_forward_kernel("Forward", Instance{logits_threads, wide, none, 0},
                                                     Instance{logits_row_threads, wide, none, logits_row_threads});
Launch cross_entropy_forward(const DeviceProfile&, const LogitsShape&, bool after_counts, const Knobs* = nullptr);

inline constexpr Kernel cross_entropy_backward_kernel("Backward", Instance{independent_threads, 1}, Instance{independent_threads, wide});
Launch cross_entropy_backward(const DeviceProfile&, const LogitsShape&, const Knobs* = nullptr);

// The fused loss's, which need each row twice: rows that a block or a cluster of blocks holds, if they have whole vectors; and all others.
// The constants are how many vectors a thread holds in registers: fewer of rows that lie in several matrices (chunks of the vocabulary),
// and if the loss is not `plain`, that is, has options that cost registers, or is one of log-probabilities. Rows of those kinds are held in
// 16 bits alone, and the last two only where there are clusters. What registers do not hold is in shared memory (the plan's slots).
constexpr int held_in_registers = 8, held_of_chunks = 7, held_of_tokens = 5, held_of_full = 4;
inline constexpr Kernel in_place_held("InPlaceHeld", Instance{row_threads, wide, held_in_registers},
                                      Instance{row_threads, 8, held_of_chunks}, Instance{row_threads, 8, held_of_full, none, true});
inline constexpr Kernel in_place_tokens("InPlaceTokens", Instance{row_threads, 8, held_of_tokens, none, true});
inline constexpr Kernel in_place_kernel("InPlace", Instance{row_threads, 1}, Instance{row_threads, wide});
Launch cross_entropy_in_place(const DeviceProfile&, const LogitsShape&, bool plain, const Knobs* = nullptr);
// The launch of InPlaceHeld, or for log-probabilities (tokens) of InPlaceTokens, for 16-bit rows that lie in `chunks` matrices, one for
// each chunk of the vocabulary; or none.
inline constexpr int most_vocabulary_chunks = 16;
std::optional<Launch> cross_entropy_in_chunks(const DeviceProfile&, const LogitsShape&, bool tokens, int chunks, const Knobs* = nullptr);

// The statistics of one chunk of the vocabulary, and the merge of all chunks, which has a thread for each row.
inline constexpr Kernel statistics_kernel("Statistics", Instance{logits_threads, wide});
Launch cross_entropy_statistics(const DeviceProfile&, const LogitsShape&);
inline constexpr Kernel merge_kernel("Merge", Instance{independent_threads});
Launch cross_entropy_merge(const DeviceProfile&, int64_t rows);

// Sums over rows, three fp64 values a warp, in one block.
inline constexpr Kernel count_targets_kernel("CountTargets", Instance{row_threads});
Launch count_targets(const DeviceProfile&, int64_t rows, int64_t vocab);
// The end of a loss: SumLosses or, where each row's loss is its own (reduction "none"), AddLosses.
inline constexpr Kernel sum_losses_kernel("SumLosses", Instance{row_threads});
inline constexpr Kernel add_losses_kernel("AddLosses", Instance{independent_threads});
Launch sum_losses(const DeviceProfile&, int64_t rows);
Launch add_losses(const DeviceProfile&, int64_t rows);

}  // namespace liger::launch
