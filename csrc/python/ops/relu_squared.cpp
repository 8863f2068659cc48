#include "checks/relu_squared.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings relu_squared_bindings([](py::module_&, py::module_& checks) {
  checks.def("relu_squared", check_relu_squared).def("relu_squared_backward", check_relu_squared_backward);
});

}  // namespace liger::python
