#include "checks/fused_linear_cross_entropy.h"

#include "kernels/bad_target.h"
#include "python/ops.h"
#include "schemas.h"

namespace liger::python {

namespace {

template <class Struct> py::dict defaults(const Struct& values) {
  py::dict all;
  const auto add = [&](std::string_view name, const auto& value) {
    if constexpr (requires { value.has_value(); }) all[py::str(name)] = py::none();
    else if constexpr (!std::is_same_v<std::remove_cvref_t<decltype(value)>, Tensor>) all[py::str(name)] = py::cast(value);
  };
  std::apply([&](const auto&... member) { (add(member.name, values.*member.pointer), ...); }, Struct::members);
  return all;
}

}  // namespace

const OpBindings fused_linear_cross_entropy_bindings([](py::module_& m, py::module_& checks) {
  checks.def("fused_linear_cross_entropy", &NamedArguments<&check_fused_linear_cross_entropy, schemas::fused_linear_cross_entropy>::run);
  checks.def("fused_linear_cross_entropy_backward",
             &NamedArguments<&check_fused_linear_cross_entropy_backward, schemas::fused_linear_cross_entropy_backward>::run);
  checks.def("fused_linear_cross_entropy_backward_",
             &NamedArguments<&check_fused_linear_cross_entropy_backward_in_place, schemas::fused_linear_cross_entropy_backward_>::run);
  m.attr("rows_left_out") = rows_left_out;
  m.attr("loss_defaults") = defaults(FusedLoss{});  // of all arguments but tensors that must be passed
  // The fake implementation computes the sizes of the forward's results by these functions. A size is a number or a symbol.
  m.def("overlaid_room", [](const Size& hidden, const ScalarType& weight, const ScalarType& compute) {
    return overlaid_room(hidden, kernel_dtype(weight).value(), kernel_dtype(compute).value());
  });
  m.def("overlaid_classes", &launch::overlaid_classes<Size>, py::arg("rows"), py::arg("room"), py::arg("vocab"));
  m.def("overlaid_rest", &launch::overlaid_rest<Size>, py::arg("rows"), py::arg("room"), py::arg("vocab"), py::arg("stored"));
  m.def("gradient_state_size", &launch::gradient_state_size<Size>, py::arg("rows"), py::arg("token_scaling"));
  m.def(
      "sums_dx",
      [](int64_t gradients, const ScalarType& weight, const ScalarType& compute, bool stored) {
        return sums_dx(launch::Gradients(gradients), kernel_dtype(weight).value(), kernel_dtype(compute).value(), stored);
      },
      py::arg("gradients"), py::arg("weight"), py::arg("compute"), py::arg("stored"));
  m.def(
      "sum_sizes",
      [](const Size& vocab, const Size& hidden, const ScalarType& sum, const ScalarType& weight) {
        const SumSizes<Size> sizes(vocab, hidden, kernel_dtype(sum).value(), kernel_dtype(weight).value());
        return std::pair(sizes.memory, sizes.rest);
      },
      py::arg("vocab"), py::arg("hidden"), py::arg("sum"), py::arg("weight"),
      "The sum of dweight: elements in dweight's memory, and in the rest.");
});

}  // namespace liger::python
