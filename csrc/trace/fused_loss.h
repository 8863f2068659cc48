// Traces a call of the fused loss: runs its forward and backward with tensors without data, and records their allocations, matmuls and
// kernel launches (recorder.h).
#pragma once
#include <optional>

#include "kernels/types.h"
#include "launch/chunks.h"
#include "trace/recorder.h"

namespace liger::trace {

// The properties of a call on which its memory, time and launches depend.
struct LossCall {
  int64_t rows = 1, hidden = 1, vocab = 1;
  Dtype compute = Dtype::bf16, x = Dtype::bf16, weight = Dtype::bf16;
  std::optional<Dtype> bias, class_weight, sum;  // sum: dtype of the sum of dweight over chunks; none: the accumulator's
  bool dx = true, dweight = true, dbias = false;  // requested gradients
  bool per_row = false;  // reduction "none"
  bool label_smoothing = false, softcap = false, token_scaling = false, z_loss = false, token_accuracy = false, predicted_tokens = false;
  bool moments = false, temperature = false;  // of log-probabilities
  bool wide_logits = false;  // logits are in the accumulator's dtype
  bool in_place = true;  // the backward may compute dweight in the memory that the forward returned
  bool aligned = true;   // 16-byte accesses fit the tensors; false, for example, if a caller's hooks move saved tensors
};

// The strategy for the gradients, and the number of rows and classes of logits that exist at a time (ops/fused_linear.h).
struct LossPlan {
  launch::Gradients gradients = launch::Gradients::none;
  int64_t rows = 1, classes = 1;
};

// What the forward adds to a recorder: the number of kernels that are listed, and multiplications.
struct ForwardWork {
  size_t kernels;
  int64_t multiplications;
};
// Records the forward and, if a gradient is requested, the backward. The op's arguments do not count as allocated memory.
ForwardWork trace_fused_loss(const LossCall&, const LossPlan&, Recorder&);

}  // namespace liger::trace
