// Rotary position embedding in the half-split ("NeoX", Hugging Face) layout; arXiv:2104.09864.
// With R = rotary_dim, the first R of head_dim columns are rotated, the rest copied:
//   out[i]       = x[i] * cos[i]             - x[i + R/2] * sin[i]          for i < R/2
//   out[i + R/2] = x[i + R/2] * cos[i + R/2] + x[i]       * sin[i + R/2]
// The backward is the transpose:
//   dx[i] = d[i] * cos[i] + d[i + R/2] * sin[i + R/2],   dx[i + R/2] = d[i + R/2] * cos[i + R/2] - d[i] * sin[i]
#pragma once
#include "kernels/types.h"

namespace liger {

// [batch, heads, seq, head_dim] with a contiguous head_dim; strides in elements.
struct RopeHeads {
  const void* in;
  void* out;
  int64_t heads;
  int64_t in_batch, in_head, in_seq;     // strides
  int64_t out_batch, out_head, out_seq;
};

struct Rope {
  int64_t batch, seq, head_dim, rotary_dim;
  Dtype dtype;              // of q, k and the outputs
  RopeHeads q, k;
  const void *cos, *sin;    // [1 or batch, seq, rotary_dim], rotary_dim contiguous
  Dtype table_dtype;
  int64_t cos_batch, cos_seq, sin_batch, sin_seq;  // strides; batch stride 0: shared by the batch
  bool transpose;           // backward
};

namespace LIGER_BACKEND {
void rope(const Rope&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
