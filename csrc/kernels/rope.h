// Rotary position embedding; arXiv:2104.09864. The first R = rotary_dim of head_dim columns rotate as R/2 pairs; the others are copied:
//   out.first  = x.first  * cos.first  - x.second * sin.first
//   out.second = x.second * cos.second + x.first  * sin.second
// The backward is the transpose:
//   dx.first = d.first * cos.first + d.second * sin.second,   dx.second = d.second * cos.second - d.first * sin.first
// Pair p has columns p and p + R/2 (layout halves: "NeoX", Hugging Face's Llama), or columns 2p and 2p + 1 (layout interleaved: GPT-J).
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

// The layout of pairs in the forward's inputs and outputs.
enum class RopeLayout : int32_t { halves, interleaved, interleaved_to_halves };

struct Rope {
  int64_t batch, seq, head_dim, rotary_dim;
  Dtype dtype;              // of q, k and the outputs
  RopeHeads q, k;
  const void *cos, *sin;    // [1 or batch, seq, table_cols()], table_cols() contiguous
  Dtype table_dtype;
  int64_t cos_batch, cos_seq, sin_batch, sin_seq;  // strides; batch stride 0: shared by the batch
  bool transpose;           // backward
  bool in_interleaved, out_interleaved;
  bool half_tables;         // true: cos and sin have one column per pair; false: one column per element

  constexpr int64_t table_cols() const { return half_tables ? rotary_dim / 2 : rotary_dim; }
  // Returns whether the columns of a table of rotary_dim columns are interleaved; otherwise they are in halves.
  constexpr bool tables_interleaved() const { return in_interleaved && out_interleaved && !half_tables; }
};

namespace LIGER_BACKEND {
void rope(const Rope&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
