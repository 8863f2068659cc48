#include "checks/dequantize_4bit.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings dequantize_4bit_bindings([](py::module_&, py::module_& checks) {
  checks.def("dequantize_4bit", check_dequantize_4bit).def("dequantize_4bit_to_", check_dequantize_4bit_to);
});

}  // namespace liger::python
