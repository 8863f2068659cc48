// Lists the kernel instances of cross entropy and of the fused loss's kernels for rows of logits, and plans their launches, which
// csrc/gpu executes (launch.h).
#pragma once
#include <optional>

#include "launch/launch.h"

namespace liger::launch {

constexpr int logits_threads = 512;  // the most threads of a block that processes rows of logits
constexpr int logits_row_threads = 128;  // threads of a block that has a single row, if there are enough rows to fill the device

// The number of vectors that a thread loads before it uses the first one: logits_in_flight in kernels over rows (fewer if options need the
// registers), logit_tile_k in the backward's tiles.
constexpr int logits_in_flight(bool full) { return full ? 2 : 4; }
constexpr int logit_tile_k(int vec) { return vec == 1 ? 2 : 4; }

struct LogitsShape {
  int64_t rows, vocab;
  int element_bytes, vec;  // vec: elements per access
  bool full = false;  // the call has options that cost instructions per element
};
// Returns whether this instance is compiled for calls with these options (full), or for calls without them.
constexpr bool compiled_for_options(bool full, const Instance& instance) { return full ? instance.row_layout <= 0 : instance.vec > 1; }

// threads: the threads of a row, which has its block to itself, as a compile-time constant; 0: the number is a run-time argument.
// after_counts: the kernel before this one is the one that counts targets, so that this one may start while that one runs.
inline constexpr Kernel cross_entropy_forward_kernel("Forward", Instance{logits_threads, wide, none, any_threads},
                                                     Instance{logits_row_threads, wide, none, logits_row_threads});
Launch cross_entropy_forward(const DeviceProfile&, const LogitsShape&, bool after_counts, const Knobs* = nullptr);

inline constexpr Kernel cross_entropy_backward_kernel("Backward", Instance{independent_threads, 1}, Instance{independent_threads, wide});
Launch cross_entropy_backward(const DeviceProfile&, const LogitsShape&, const Knobs* = nullptr);

// The fused loss's kernels, which need each row twice. InPlaceHeld and InPlaceLogProbs (for log-probabilities) process most aligned rows
// that a block or a cluster of blocks holds; InPlace processes other rows that lie in one matrix, except for log-probabilities. The
// constants are the numbers of vectors that a thread holds in registers; its other vectors are in shared memory (plan.slots). Registers
// hold fewer vectors for three kinds of rows: rows that lie in several matrices (chunks of the vocabulary), rows of log-probabilities, and
// rows of a loss with options that cost registers (not `plain`). The kernels hold these kinds only if the logits have 16 bits, and the last
// two kinds only on devices with clusters.
constexpr int held_in_registers = 8, held_with_chunks = 7, held_with_log_probs = 5, held_with_options = 4;
inline constexpr Kernel in_place_held("InPlaceHeld", Instance{row_threads, wide, held_in_registers},
                                      Instance{row_threads, 8, held_with_chunks}, Instance{row_threads, 8, held_with_options, none, true});
inline constexpr Kernel in_place_log_probs("InPlaceLogProbs", Instance{row_threads, 8, held_with_log_probs, none, true});
inline constexpr Kernel in_place_kernel("InPlace", Instance{row_threads, 1}, Instance{row_threads, wide});
Launch cross_entropy_in_place(const DeviceProfile&, const LogitsShape&, bool plain, const Knobs* = nullptr);
// The launch of InPlaceHeld, or for log-probabilities of InPlaceLogProbs, for 16-bit rows that lie in `chunks` matrices, one for
// each chunk of the vocabulary. Returns nothing if neither kernel can hold the rows.
inline constexpr int most_vocabulary_chunks = 16;
std::optional<Launch> cross_entropy_in_chunks(const DeviceProfile&, const LogitsShape&, bool log_probs, int chunks, const Knobs* = nullptr);

// The statistics of one chunk of the vocabulary, and the merge of all chunks, which has a thread for each row.
inline constexpr Kernel statistics_kernel("Statistics", Instance{logits_threads, wide});
Launch cross_entropy_statistics(const DeviceProfile&, const LogitsShape&);
inline constexpr Kernel merge_kernel("Merge", Instance{independent_threads});
Launch cross_entropy_merge(const DeviceProfile&, int64_t rows);

// Sums over rows in one block, with three fp64 values of shared memory per warp.
inline constexpr Kernel count_targets_kernel("CountTargets", Instance{row_threads});
Launch count_targets(const DeviceProfile&, int64_t rows, int64_t vocab);
// The last kernel of a loss: SumLosses, or AddLosses if each row's loss is a result (reduction "none").
inline constexpr Kernel sum_losses_kernel("SumLosses", Instance{row_threads});
inline constexpr Kernel add_losses_kernel("AddLosses", Instance{independent_threads});
Launch sum_losses(const DeviceProfile&, int64_t rows);
Launch add_losses(const DeviceProfile&, int64_t rows);

}  // namespace liger::launch
