// What is registered for an op, and how its errors reach Python.
#pragma once
#include <torch/csrc/stable/library.h>

#include <utility>

#include "checks/named.h"

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

// Those of one that takes its arguments as a struct, in the order of its schema.
template <auto op, auto check, class Order> struct CheckedNamed {
  static constexpr auto checked = [](const auto& named) {
    check(named);
    return op(named);
  };
  static constexpr auto run = &Named<Order, checked>::run;
};

// An op behind the check of its arguments (csrc/checks), with errors that keep their type: boxed<softmax_op, check_softmax>.
template <auto op, auto check, class... Order> void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  constexpr auto run = [] {
    if constexpr (sizeof...(Order) == 0) return &Checked<op, check>::run;
    else return CheckedNamed<op, check, Order...>::run;
  }();
  try {
    TORCH_BOX(run)(stack, inputs, outputs);
  } catch (...) {
    rethrow_for_python();
  }
}

}  // namespace liger
