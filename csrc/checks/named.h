// Passes an op's many arguments as one struct. An op's schema is a flat list of arguments, so an Order lists the struct's members in the
// order of the schema.
#pragma once
#include <tuple>
#include <type_traits>
#include <utility>

namespace liger {

// run(arguments...) stores the arguments in the members Order::fields of an Order::F, and calls `function` with it. Order::fields is a
// tuple of member pointers, which may be those of a base class.
template <class Order, auto function, class Fields = std::remove_cvref_t<decltype(Order::fields)>> struct NamedArguments;
template <class Order, auto function, class... Structs, class... Members>
struct NamedArguments<Order, function, std::tuple<Members Structs::*...>> {
  static auto run(Members... arguments) {
    typename Order::F named;
    std::apply([&](auto... field) { ((named.*field = std::move(arguments)), ...); }, Order::fields);
    return function(named);
  }
};

}  // namespace liger
