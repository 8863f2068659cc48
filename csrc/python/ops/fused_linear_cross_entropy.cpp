#include "checks/fused_linear_cross_entropy.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings fused_linear_cross_entropy_bindings([](py::module_&, py::module_& checks) {
  checks.def("fused_linear_cross_entropy", check_fused_linear_cross_entropy);
  checks.def("fused_linear_cross_entropy_backward", check_fused_linear_cross_entropy_backward);
  checks.def("fused_linear_cross_entropy_backward_", check_fused_linear_cross_entropy_backward_in_place);
});

}  // namespace liger::python
