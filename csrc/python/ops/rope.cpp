#include "checks/rope.h"
#include "kernels/rope.h"
#include "python/ops.h"

namespace liger::python {

const OpBindings rope_bindings([](py::module_& m, py::module_& checks) {
  checks.def("rope", check_rope).def("rope_backward", check_rope_backward);
  py::enum_<RopeLayout>(m, "RopeLayout")
      .value("halves", RopeLayout::halves)
      .value("interleaved", RopeLayout::interleaved)
      .value("interleaved_to_halves", RopeLayout::interleaved_to_halves);
  m.def("rope_keeps_strides", keeps_strides, "Whether rope's output has the strides of this input; otherwise it is contiguous.");
});

}  // namespace liger::python
