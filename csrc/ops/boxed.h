// What is registered for an op, and how its errors reach Python.
#pragma once
#include <torch/csrc/stable/library.h>

#include <utility>

namespace liger {

// Throws the exception being handled again, as one that every version of torch turns into the Python type that errors.h names.
[[noreturn]] void rethrow_for_python();

template <auto op, auto check> struct Checked;
template <class Result, class... Args, Result (*op)(Args...), auto check> struct Checked<op, check> {
  static Result run(Args... args) {
    check(args...);
    return op(std::move(args)...);
  }
};

// An op behind the check of its arguments (csrc/checks), with errors that keep their type: boxed<softmax_op, check_softmax>.
template <auto op, auto check> void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  constexpr auto run = &Checked<op, check>::run;
  try {
    TORCH_BOX(run)(stack, inputs, outputs);
  } catch (...) {
    rethrow_for_python();
  }
}

}  // namespace liger
