#include "checks/group_norm.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings group_norm_bindings([](py::module_&, py::module_& checks) {
  checks.def("group_norm", check_group_norm).def("group_norm_backward", check_group_norm_backward);
});

}  // namespace liger::python
