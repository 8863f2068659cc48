// The ops of csrc/ops for the trace, in a table by their names, which STABLE_TORCH_LIBRARY_IMPL fills in place of torch's dispatcher. Each
// takes the arguments of its schema, without data.
#pragma once
#include <map>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include "checks/named.h"
#include "kernels/errors.h"
#include "trace/tensor.h"

namespace liger::trace {

// A tensor without data. offset: bytes from an address that is a multiple of 16.
struct Layout {
  std::vector<int64_t> sizes, strides;
  ScalarType dtype;
  int64_t offset = 0;
};
using Argument = std::variant<std::monostate, bool, int64_t, double, ScalarType, Layout>;

// Stores an argument in a parameter of an op, or in a member of its struct. Throws std::invalid_argument for a type that the op refuses.
void store(const Argument&, Tensor& to, Recorder&);
void store(const Argument&, bool& to, Recorder&);
void store(const Argument&, int64_t& to, Recorder&);
void store(const Argument&, double& to, Recorder&);
void store(const Argument&, ScalarType& to, Recorder&);
template <class T> void store(const Argument& argument, std::optional<T>& to, Recorder& recorder) {
  if (!std::holds_alternative<std::monostate>(argument)) store(argument, to.emplace(), recorder);
}

// Calls a function with arguments without data, whose memory does not count.
template <class Result, class... Args> void call(Result (*function)(Args...), std::span<const Argument> arguments, Recorder& recorder) {
  require(arguments.size() == sizeof...(Args), "the op has ", sizeof...(Args), " arguments, not ", arguments.size());
  std::tuple<std::remove_cvref_t<Args>...> values;
  recorder.counts = false;
  [&]<size_t... index>(std::index_sequence<index...>) {
    (store(arguments[index], std::get<index>(values), recorder), ...);
  }(std::index_sequence_for<Args...>{});
  recorder.counts = true;
  std::apply(function, std::move(values));
}

using TracedOp = void (*)(std::span<const Argument>, Recorder&);
std::map<std::string_view, TracedOp>& traced_ops();

// The function to register for an op, as in ops/boxed.h.
template <auto op, auto check, const auto&... schema> void boxed(std::span<const Argument> arguments, Recorder& recorder) {
  call(checked<op, check, schema...>(), arguments, recorder);
}
struct Library {
  explicit Library(void (*implement)(Library&)) { implement(*this); }
  void impl(const char* name, TracedOp op) { traced_ops()[name] = op; }
};
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m)                      \
  static void implement_ops(::liger::trace::Library&);               \
  static const ::liger::trace::Library registration(&implement_ops); \
  static void implement_ops(::liger::trace::Library& m)

}  // namespace liger::trace
