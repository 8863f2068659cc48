// The ops of gated activations: glu, glu_packed and their backwards.
#include "kernels/glu.h"

#include "checks/glu.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

// Rows of gate and up: of two tensors, or the halves of one.
struct Halves {
  RowsView gate, up;
};

Halves separate_tensors(const Scope& scope, const Tensor& gate, const Tensor& up) { return {as_rows(scope, gate), as_rows(scope, up)}; }

Halves packed(const Scope& scope, const Tensor& gate_up) {
  RowsView gate = as_rows(scope, gate_up);
  gate.cols /= 2;
  RowsView up = gate;
  up.view.data = at(gate.view.data, gate.cols, gate.view.dtype);
  return {gate, up};
}

Tensor forward(const Scope& scope, const Tensor& like, const Halves& in, int64_t activation, double gate_multiplier,
               double down_multiplier) {
  auto sizes = tensor_sizes(like);
  sizes.back() = in.gate.cols;
  Tensor h = allocate(scope, sizes, in.gate.view.dtype, like);
  if (h.numel() > 0)
    glu_forward({in.gate.rows, in.gate.cols, in.gate, in.up, mutable_rows(h), Activation(activation), gate_multiplier, down_multiplier},
                scope);
  return h;
}

void backward(const Scope& scope, const Tensor& dh, const Halves& in, MutableRows dgate, MutableRows dup, int64_t activation,
              double gate_multiplier, double down_multiplier, MutableRows h = {}) {
  const RowsView dh_rows = as_rows(scope, dh);
  if (dh.numel() > 0)
    glu_backward(
        {in.gate.rows, in.gate.cols, dh_rows, in.gate, in.up, dgate, dup, Activation(activation), gate_multiplier, down_multiplier, h},
        scope);
}

Tensor glu_op(Tensor gate, Tensor up, int64_t activation, double gate_multiplier, double down_multiplier) {
  const Scope scope("glu", gate);
  return forward(scope, gate, separate_tensors(scope, gate, up), activation, gate_multiplier, down_multiplier);
}

std::tuple<Tensor, Tensor> glu_backward_op(Tensor dh, Tensor gate, Tensor up, int64_t activation, double gate_multiplier,
                                           double down_multiplier) {
  const Scope scope("glu_backward", gate);
  const Halves in = separate_tensors(scope, gate, up);
  Tensor dgate = allocate_like(scope, gate), dup = allocate_like(scope, up);
  backward(scope, dh, in, mutable_rows(dgate), mutable_rows(dup), activation, gate_multiplier, down_multiplier);
  return {dgate, dup};
}

std::tuple<Tensor, Tensor> glu_backward_with_h_op(Tensor dh, Tensor gate, Tensor up, int64_t activation, double gate_multiplier,
                                                  double down_multiplier) {
  const Scope scope("glu_backward_with_h_", gate);
  require_apart(scope, dh, "dh", gate, "gate");
  require_apart(scope, dh, "dh", up, "up");
  const Halves in = separate_tensors(scope, gate, up);
  Tensor dgate = allocate_like(scope, gate), dup = allocate_like(scope, up);
  backward(scope, dh, in, mutable_rows(dgate), mutable_rows(dup), activation, gate_multiplier, down_multiplier, mutable_rows(dh));
  return {dgate, dup};
}

Tensor glu_packed_op(Tensor gate_up, int64_t activation, double gate_multiplier, double down_multiplier) {
  const Scope scope("glu_packed", gate_up);
  return forward(scope, gate_up, packed(scope, gate_up), activation, gate_multiplier, down_multiplier);
}

Tensor glu_packed_backward_op(Tensor dh, Tensor gate_up, int64_t activation, double gate_multiplier, double down_multiplier) {
  const Scope scope("glu_packed_backward", gate_up);
  const Halves in = packed(scope, gate_up);
  Tensor grad = allocate_like(scope, gate_up);
  const MutableRows dgate = mutable_rows(grad);
  MutableRows dup = dgate;
  dup.data = at(dgate.data, in.gate.cols, dgate.dtype);
  backward(scope, dh, in, dgate, dup, activation, gate_multiplier, down_multiplier);
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("glu", boxed<glu_op, check_glu>);
  m.impl("glu_backward", boxed<glu_backward_op, check_glu_backward>);
  m.impl("glu_backward_with_h_", boxed<glu_backward_with_h_op, check_glu_backward_with_h>);
  m.impl("glu_packed", boxed<glu_packed_op, check_glu_packed>);
  m.impl("glu_packed_backward", boxed<glu_packed_backward_op, check_glu_packed_backward>);
}

}  // namespace liger::LIGER_BACKEND
