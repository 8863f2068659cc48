// Traces a call of the fused loss: runs its check, forward and backward with tensors without data, and records their allocations, matmuls
// and kernel launches (recorder.h).
#pragma once
#include <array>
#include <span>

#include "trace/library.h"

namespace liger::trace {

// What the forward adds to a recorder: the number of kernels that are listed, and multiplications.
struct ForwardWork {
  size_t kernels;
  int64_t multiplications;
};

// Records the forward and, if a gradient is requested, the backward. The op's arguments do not count as allocated memory. in_place: the
// backward may compute dweight in the memory that the forward returned. Throws std::invalid_argument for a call that the op refuses.
struct FusedLoss;
ForwardWork trace_fused_loss(FusedLoss, bool in_place, Recorder&);

// The same for the op's arguments in the order of its schema (schemas.h), with a plan in place of gradients, chunk_rows and chunk_classes.
using LossPlan = std::array<int64_t, 3>;
ForwardWork trace_fused_loss(std::span<const Argument>, const LossPlan&, bool in_place, Recorder&);

}  // namespace liger::trace
