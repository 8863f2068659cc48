// Checks of the arguments of glu (gate and up in two tensors), of glu_packed (both in one tensor), and of their backwards.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_activation(const char* op, int64_t code) {
  require(code >= 0 && code <= 2, op, ": activation is ", code, ", expected 0 (silu), 1 (gelu by tanh) or 2 (exact gelu)");
}

// Returns the op's name in Python.
inline const char* python_name(int64_t activation, const char* swiglu, const char* geglu) { return activation == 0 ? swiglu : geglu; }

inline void check_gate_and_up(const char* op, const Tensor& gate, const Tensor& up, int64_t activation) {
  check_rows(op, gate, "gate");
  check_same(op, up, "up", gate, "gate");
  check_activation(op, activation);
}

inline void check_glu(const Tensor& gate, const Tensor& up, int64_t activation, double gate_multiplier, double down_multiplier) {
  check_gate_and_up(python_name(activation, "swiglu", "geglu"), gate, up, activation);
}

inline void check_glu_backward(const Tensor& dh, const Tensor& gate, const Tensor& up, int64_t activation, double gate_multiplier,
                               double down_multiplier) {
  check_gate_and_up("glu_backward", gate, up, activation);
  check_same("glu_backward", dh, "dh", gate, "gate");
}

inline void check_glu_backward_with_h(const Tensor& dh, const Tensor& gate, const Tensor& up, int64_t activation, double gate_multiplier,
                                      double down_multiplier) {
  const char* op = "glu_backward_with_h_";
  check_gate_and_up(op, gate, up, activation);
  check_same(op, dh, "dh", gate, "gate");
  require(dh.is_contiguous(), op, ": dh is not contiguous, expected a contiguous tensor, since it is overwritten");
}

inline void check_halves(const char* op, const Tensor& gate_up, int64_t activation) {
  check_rows(op, gate_up, "gate_up");
  require(column_count(gate_up) % 2 == 0, op, ": gate_up has ", column_count(gate_up), " columns, expected an even number (gate, then up)");
  check_activation(op, activation);
}

inline void check_glu_packed(const Tensor& gate_up, int64_t activation, double gate_multiplier, double down_multiplier) {
  check_halves(python_name(activation, "swiglu_packed", "geglu_packed"), gate_up, activation);
}

inline void check_glu_packed_backward(const Tensor& dh, const Tensor& gate_up, int64_t activation, double gate_multiplier,
                                      double down_multiplier) {
  const char* op = "glu_packed_backward";
  check_halves(op, gate_up, activation);
  check_device(op, dh, "dh", gate_up, "gate_up");
  require(dh.dim() >= 1 && row_count(dh) == row_count(gate_up) && column_count(dh) * 2 == column_count(gate_up), op, ": dh has shape ",
          shape_text(dh), ", expected that of gate_up, ", shape_text(gate_up), ", with half its columns");
  check_same_dtype(op, dh, "dh", gate_up, "gate_up");
}

}  // namespace liger::LIGER_BACKEND
