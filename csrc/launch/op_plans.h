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
  bool mixed = false;  // norms: a parameter is missing or of another dtype than the result; backward: dtypes of dy, dsum and x differ
  bool full = false;  // losses: options that cost instructions per element
  bool per_row = false;  // losses: reduction "none"
  bool bias = false;  // layer_norm, group_norm, fused loss
  bool frozen = false;  // norms, backward: no parameter wants a gradient, and the weight is of x's type
  int64_t q_heads = 1, k_heads = 1, rotary_dim = 0;  // rope; rotary_dim 0: all of the head
  int64_t hidden = 1, chunk_rows = 0, chunk_classes = 0;  // fused loss; 0: all at a time
  int64_t groups = 1, channel = 0;  // group_norm: groups of a sample, elements of a channel; 0: all of the group
  Knobs knobs;  // for those of its launches that have some
};

inline int wide_vec(const Call& call) { return 16 / call.element_bytes; }
// Of rows whose length has to be whole vectors.
inline int row_vec(const Call& call) { return call.aligned && call.cols % wide_vec(call) == 0 ? wide_vec(call) : 1; }
inline bool empty(const Call& call) { return call.rows == 0 || call.cols == 0; }

using Launches = std::vector<Launch>;

// An op, or the backward of one, for the functions below: its launches and the kernels that they may be of. Each is a constant of
// launch/<op>.cpp.
struct Planned {
  Planned(const char* op, Launches (*launches)(const DeviceProfile&, const Call&), std::vector<const Kernel*> kernels);
  Planned(const Planned&) = delete;

  const std::string op;
  Launches (*const launches)(const DeviceProfile&, const Call&);
  const std::vector<const Kernel*> kernels;
};

// The launches of an op, in order; std::invalid_argument lists the ops there are. Matmuls, which are cuBLAS's or hipBLAS's, are not among
// them. A fused loss's are those of its first chunk.
Launches plans(std::string_view op, const DeviceProfile&, const Call&);
std::vector<std::string> planned_ops();
// All kernels, with their instances.
std::vector<const Kernel*> kernels();

}  // namespace liger::launch
