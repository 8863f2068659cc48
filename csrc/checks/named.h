// An op's many arguments as one struct. A schema is flat, so an order lists the struct's members as the schema has them.
#pragma once
#include <tuple>
#include <type_traits>
#include <utility>

namespace liger {

// run(arguments...) calls `function` with an Order::F whose members Order::fields, a tuple of member pointers, have these values. They may
// be a base's.
template <class Order, auto function, class Fields = std::remove_cvref_t<decltype(Order::fields)>> struct Named;
template <class Order, auto function, class... Structs, class... Members> struct Named<Order, function, std::tuple<Members Structs::*...>> {
  static auto run(Members... arguments) {
    typename Order::F named;
    std::apply([&](auto... field) { ((named.*field = std::move(arguments)), ...); }, Order::fields);
    return function(named);
  }
};

}  // namespace liger
