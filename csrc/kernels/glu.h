// Gated linear units: h = down_multiplier * act(gate_multiplier * gate) * up; arXiv:2002.05202.
// SwiGLU has act = silu; GeGLU act = gelu, by tanh or exact. Packed inputs are two views of one tensor: only strides differ.
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
  MutableRows h;  // the forward's, to the bit; it may be dh's memory. data == nullptr: not wanted
};

namespace LIGER_BACKEND {
void glu_forward(const GluForward&, Stream);
void glu_backward(const GluBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
