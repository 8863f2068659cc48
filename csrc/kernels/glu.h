// Gated activations: h = down_multiplier * act(gate_multiplier * gate) * up; arXiv:2002.05202.
// SwiGLU has act = silu; GeGLU act = gelu, by tanh or exact. A packed input is passed as two views of one tensor, with its stride.
#pragma once
#include "kernels/types.h"

namespace liger {

enum class Activation : int32_t { silu, gelu_tanh, gelu };

struct GluForward {
  int64_t rows, cols;
  Rows gate, up;      // one dtype
  MutableRows h;
  Activation activation;
  double gate_multiplier, down_multiplier;
};

struct GluBackward {
  int64_t rows, cols;
  Rows dh, gate, up;
  MutableRows dgate, dup;
  Activation activation;
  double gate_multiplier, down_multiplier;
  MutableRows h;  // recomputed, with the forward's bits; it may overwrite dh. data == nullptr: not requested
};

namespace LIGER_BACKEND {
void glu_forward(const GluForward&, Stream);
void glu_backward(const GluBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
