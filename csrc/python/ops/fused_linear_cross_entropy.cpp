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

std::vector<std::pair<std::vector<Size>, std::string>> saved(const FusedLoss& a) {
  const HeadDtypes dtypes = head_dtypes("fused_linear_cross_entropy", a.x, a.weight, a.accum_dtype, a.compute_dtype, a.logits_dtype);
  const SavedTensors found = saved_tensors(a, dtypes);
  std::vector<std::pair<std::vector<Size>, std::string>> all;
  for (const SavedTensor& t : {found.counts, found.saved, found.dx, found.dweight, found.dbias})
    all.emplace_back(t.shape(), scalar_type(t.dtype).name);
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
  m.def("saved_tensors", &NamedArguments<&saved, schemas::fused_linear_cross_entropy>::run,
        "The shape and dtype of each tensor that the fused loss saves for its backward, in the order of its results.");
});

}  // namespace liger::python
