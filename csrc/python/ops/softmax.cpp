#include "checks/softmax.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings softmax_bindings([](py::module_&, py::module_& checks) {
  checks.def("softmax", check_softmax).def("softmax_backward", check_softmax_backward);
});

}  // namespace liger::python
