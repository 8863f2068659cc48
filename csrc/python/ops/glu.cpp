#include "checks/glu.h"

#include "kernels/glu.h"
#include "python/ops.h"

namespace liger::python {

const OpBindings glu_bindings([](py::module_& m, py::module_& checks) {
  checks.def("glu", check_glu).def("glu_backward", check_glu_backward).def("glu_backward_with_h_", check_glu_backward_with_h);
  checks.def("glu_packed", check_glu_packed).def("glu_packed_backward", check_glu_packed_backward);
  py::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("gelu", Activation::gelu);
});

}  // namespace liger::python
