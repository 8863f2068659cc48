// Wraps an op for its registration with torch: the check of its arguments runs first, and errors of C++ become errors of Python.
#pragma once
#include <torch/csrc/stable/library.h>

#include <utility>

#include "checks/named.h"

namespace liger {

// Rethrows the current exception as one that every version of torch translates into the Python type that errors.h lists.
[[noreturn]] void rethrow_for_python();

template <auto op, auto check> struct Checked;
template <class Result, class... Args, Result (*op)(Args...), auto check> struct Checked<op, check> {
  static Result run(Args... args) {
    check(args...);
    return op(std::move(args)...);
  }
};

// The same for an op that takes its arguments as a struct.
template <auto op, auto check> struct CheckedNamed;
template <class Result, class Struct, Result (*op)(const Struct&), auto check> struct CheckedNamed<op, check> {
  static Result run(const Struct& named) {
    check(named);
    return op(named);
  }
};

// The function to register for an op: boxed<softmax_op, check_softmax>. It runs the check (csrc/checks), then the op. An exception becomes
// the Python error that errors.h lists. An op that takes a struct also passes its schema.
template <auto op, auto check, const auto&... schema> void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  constexpr auto run = [] {
    if constexpr (sizeof...(schema) == 0) return &Checked<op, check>::run;
    else return &NamedArguments<&CheckedNamed<op, check>::run, schema...>::run;
  }();
  try {
    TORCH_BOX(run)(stack, inputs, outputs);
  } catch (...) {
    rethrow_for_python();
  }
}

}  // namespace liger
