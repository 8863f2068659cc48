#include "checks/jsd.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings jsd_bindings([](py::module_&, py::module_& checks) {
  checks.def("jsd", check_jsd).def("jsd_backward", check_jsd_backward);
});

}  // namespace liger::python
