#include "checks/norms.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings norms_bindings([](py::module_&, py::module_& checks) {
  checks.def("rms_norm", check_rms_norm).def("rms_norm_backward", check_rms_norm_backward);
  checks.def("add_rms_norm", check_add_rms_norm).def("add_rms_norm_backward", check_add_rms_norm_backward);
  checks.def("layer_norm", check_layer_norm).def("layer_norm_backward", check_layer_norm_backward);
});

}  // namespace liger::python
