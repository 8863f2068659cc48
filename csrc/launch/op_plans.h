// The launches of whole ops, for Python: the doctor shows them, tests ask whether they are legal and cover everything, both for GPUs that
// nobody here has.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "launch/launch.h"

namespace liger::launch {

// What a call of an op is, as far as its launches depend on it.
struct Call {
  int64_t rows = 1, cols = 1;  // of x, gate, logits; rope: positions and head_dim; fused loss: tokens and vocabulary
  int element_bytes = 2;
  bool aligned = true;  // 16-byte accesses fit all rows
  bool contiguous = true;  // no gaps between rows
  bool mixed = false;  // norms: dtypes differ, or a parameter is missing
  bool full = false;  // losses: options that cost instructions per element
  bool per_row = false;  // losses: reduction "none"
  bool bias = false;  // layer_norm, fused loss
  bool frozen = false;  // norms, backward: no parameter wants a gradient, and the weight is of x's type
  int64_t q_heads = 1, k_heads = 1, rotary_dim = 0;  // rope; rotary_dim 0: all of the head
  int64_t hidden = 1, chunk_rows = 0;  // fused loss; chunk_rows 0: one chunk
  Knobs knobs;  // for those of its launches that have some
};

// The launches of an op, in order; std::invalid_argument lists the ops there are. Matmuls, which are cuBLAS's or hipBLAS's, are not among
// them. A fused loss's are those of its first chunk.
std::vector<Launch> plans(std::string_view op, const DeviceProfile&, const Call&);
std::vector<std::string> planned_ops();
// All kernels, with their instances.
std::vector<const Kernel*> kernels();

}  // namespace liger::launch
