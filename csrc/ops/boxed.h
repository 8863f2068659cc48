// Wraps an op for its registration with torch: errors of C++ become errors of Python.
#pragma once
#include <torch/csrc/stable/library.h>

#include "checks/named.h"

namespace liger {

// Rethrows the current exception as one that every version of torch translates into the Python type that errors.h lists.
[[noreturn]] void rethrow_for_python();

// The function to register for an op: boxed<softmax_op, check_softmax>. It runs the check (csrc/checks), then the op. An exception becomes
// the Python error that errors.h lists. An op that takes a struct also passes its schema.
template <auto op, auto check, const auto&... schema> void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  constexpr auto run = checked<op, check, schema...>();
  try {
    TORCH_BOX(run)(stack, inputs, outputs);
  } catch (...) {
    rethrow_for_python();
  }
}

}  // namespace liger
