#include "checks/fused_linear_cross_entropy.h"

#include "kernels/bad_target.h"
#include "python/ops.h"

namespace liger::python {

const OpBindings fused_linear_cross_entropy_bindings([](py::module_& m, py::module_& checks) {
  checks.def("fused_linear_cross_entropy", check_fused_linear_cross_entropy);
  checks.def("fused_linear_cross_entropy_backward", check_fused_linear_cross_entropy_backward);
  checks.def("fused_linear_cross_entropy_backward_", check_fused_linear_cross_entropy_backward_in_place);
  m.attr("rows_left_out") = rows_left_out;
});

}  // namespace liger::python
