// Runs an op behind the check of its arguments (checked), and passes an op's arguments as one struct. The op's schema (schemas.h) selects
// the struct's members by name at compile time, so that neither the order nor the number of arguments stands in another place. A name
// without a member is a compile error.
//
// Struct::members is a tuple of Member{"name", &Struct::member}; the name is that of the schemas.
#pragma once
#include <algorithm>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace liger {

template <class Value, class Struct> struct Member {
  using Type = Value;
  std::string_view name;
  Value Struct::* pointer;
};
template <class Value, class Struct> Member(const char*, Value Struct::*) -> Member<Value, Struct>;

// "Tensor x, Tensor(a!) y" of "op(Tensor x, Tensor(a!) y) -> Tensor".
constexpr std::string_view schema_arguments(std::string_view schema) {
  const size_t begin = schema.find('(') + 1;
  return schema.substr(begin, schema.find(") ->") - begin);
}
constexpr size_t argument_count(std::string_view schema) { return 1 + size_t(std::ranges::count(schema_arguments(schema), ',')); }
constexpr std::string_view argument_name(std::string_view schema, size_t index) {
  std::string_view text = schema_arguments(schema);
  for (; index > 0; --index) text.remove_prefix(text.find(", ") + 2);
  text = text.substr(0, text.find(", "));
  return text.substr(text.rfind(' ') + 1);
}

template <class Struct> consteval size_t member_index(std::string_view name) {
  size_t index = 0, found = std::tuple_size_v<decltype(Struct::members)>;
  std::apply([&](const auto&... member) { ((found = member.name == name ? index : found, ++index), ...); }, Struct::members);
  if (found == index) throw "the struct has no member of this name";
  return found;
}

// run(arguments...) stores an op's arguments in a Struct, and calls `function` with it. collect(store) calls store(i, member) for the
// member of each argument i.
template <auto function, const auto& schema, class Indices = std::make_index_sequence<argument_count(schema)>> struct NamedArguments;
template <class Result, class Struct, Result (*function)(const Struct&), const auto& schema, size_t... index>
struct NamedArguments<function, schema, std::index_sequence<index...>> {
  using Members = std::remove_const_t<decltype(Struct::members)>;
  template <size_t i> static constexpr size_t member = member_index<Struct>(argument_name(schema, i));

  static Result run(typename std::tuple_element_t<member<index>, Members>::Type... arguments) {
    Struct named;
    ((named.*std::get<member<index>>(Struct::members).pointer = std::move(arguments)), ...);
    return function(named);
  }
  template <class Store> static Struct collect(const Store& store) {
    Struct named;
    (store(index, named.*std::get<member<index>>(Struct::members).pointer), ...);
    return named;
  }
};

// Runs the check of an op's arguments (csrc/checks), then the op.
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

template <auto op, auto check, const auto&... schema> consteval auto checked() {
  if constexpr (sizeof...(schema) == 0) return &Checked<op, check>::run;
  else return &NamedArguments<&CheckedNamed<op, check>::run, schema...>::run;
}

}  // namespace liger
