#include "kernels/glu.h"

#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Activation activation_of(const char* op, int64_t code) {
  require(code >= 0 && code <= 2, op, ": activation is ", code, ", expected 0 (silu), 1 (gelu by tanh) or 2 (exact gelu)");
  return static_cast<Activation>(code);
}

// gate and up, given as two tensors or as the halves of one.
struct Halves {
  RowsView gate, up;
};

Halves two_tensors(const char* op, const Tensor& gate, const Tensor& up) {
  check_device(op, up, "up", gate, "gate");
  check_same_shape(op, up, "up", gate, "gate");
  require(type_of(gate) == type_of(up), op, ": up has dtype ", dtype_name(type_of(up)), ", expected that of gate, ",
          dtype_name(type_of(gate)));
  return {as_rows(op, gate, "gate"), as_rows(op, up, "up")};
}

const void* at(const void* data, int64_t elements, Dtype dtype) { return static_cast<const char*>(data) + elements * size_of(dtype); }
void* at(void* data, int64_t elements, Dtype dtype) { return static_cast<char*>(data) + elements * size_of(dtype); }

Halves packed(const char* op, const Tensor& gate_up) {
  RowsView gate = as_rows(op, gate_up, "gate_up");
  require(gate.cols % 2 == 0, op, ": gate_up has ", gate.cols, " columns, expected an even number (gate, then up)");
  gate.cols /= 2;
  RowsView up = gate;
  up.view.data = at(gate.view.data, gate.cols, gate.view.dtype);
  return {gate, up};
}

Tensor forward(const Scope& scope, const Tensor& shape_of, const Halves& in, int64_t activation, double gate_multiplier,
               double down_multiplier) {
  const Activation act = activation_of(scope.op(), activation);
  auto sizes = sizes_of(shape_of);
  sizes.back() = in.gate.cols;
  Tensor h = allocate(scope, sizes, in.gate.view.dtype, shape_of);
  if (h.numel() > 0)
    glu_forward({in.gate.rows, in.gate.cols, in.gate, in.up, mutable_rows(h, "h"), act, gate_multiplier, down_multiplier}, scope);
  return h;
}

void backward(const Scope& scope, const Tensor& dh, const Halves& in, MutableRows dgate, MutableRows dup, int64_t activation,
              double gate_multiplier, double down_multiplier) {
  const Activation act = activation_of(scope.op(), activation);
  const RowsView dh_rows = as_rows(scope.op(), dh, "dh");
  require(dh_rows.rows == in.gate.rows && dh_rows.cols == in.gate.cols, scope.op(), ": dh has shape ", shape_text(dh), ", expected ",
          in.gate.rows, " rows of ", in.gate.cols);
  require(dh_rows.view.dtype == in.gate.view.dtype, scope.op(), ": dh has dtype ", dtype_name(type_of(dh)), ", expected that of gate");
  if (dh.numel() > 0)
    glu_backward({in.gate.rows, in.gate.cols, dh_rows, in.gate, in.up, dgate, dup, act, gate_multiplier, down_multiplier}, scope);
}

Tensor glu_op(Tensor gate, Tensor up, int64_t activation, double gate_multiplier, double down_multiplier) {
  const Scope scope("glu", gate, "gate");
  return forward(scope, gate, two_tensors(scope.op(), gate, up), activation, gate_multiplier, down_multiplier);
}

std::tuple<Tensor, Tensor> glu_backward_op(Tensor dh, Tensor gate, Tensor up, int64_t activation, double gate_multiplier,
                                           double down_multiplier) {
  const Scope scope("glu_backward", gate, "gate");
  const Halves in = two_tensors(scope.op(), gate, up);
  Tensor dgate = allocate_like(scope, gate), dup = allocate_like(scope, up);
  backward(scope, dh, in, mutable_rows(dgate, "gate"), mutable_rows(dup, "up"), activation, gate_multiplier, down_multiplier);
  return {dgate, dup};
}

Tensor glu_packed_op(Tensor gate_up, int64_t activation, double gate_multiplier, double down_multiplier) {
  const Scope scope("glu_packed", gate_up, "gate_up");
  return forward(scope, gate_up, packed(scope.op(), gate_up), activation, gate_multiplier, down_multiplier);
}

Tensor glu_packed_backward_op(Tensor dh, Tensor gate_up, int64_t activation, double gate_multiplier, double down_multiplier) {
  const Scope scope("glu_packed_backward", gate_up, "gate_up");
  const Halves in = packed(scope.op(), gate_up);
  Tensor grad = allocate_like(scope, gate_up);
  const MutableRows dgate = mutable_rows(grad, "gate_up");
  MutableRows dup = dgate;
  dup.data = at(dgate.data, in.gate.cols, dgate.dtype);
  backward(scope, dh, in, dgate, dup, activation, gate_multiplier, down_multiplier);
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("glu", boxed<glu_op>);
  m.impl("glu_backward", boxed<glu_backward_op>);
  m.impl("glu_packed", boxed<glu_packed_op>);
  m.impl("glu_packed_backward", boxed<glu_packed_backward_op>);
}

}  // namespace liger::LIGER_BACKEND
