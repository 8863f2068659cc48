// What is registered for an op, and how its errors reach Python.
#pragma once
#include <torch/csrc/stable/library.h>

namespace liger {

// Throws the exception being handled again, as one that every version of torch turns into the Python type that errors.h names.
[[noreturn]] void rethrow_for_python();

// TORCH_BOX(op) with errors that keep their type: m.impl("softmax", boxed<softmax_op>).
template <auto op> void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  try {
    TORCH_BOX(op)(stack, inputs, outputs);
  } catch (...) {
    rethrow_for_python();
  }
}

}  // namespace liger
