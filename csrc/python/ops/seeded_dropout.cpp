#include "checks/seeded_dropout.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings seeded_dropout_bindings([](py::module_&, py::module_& checks) {
  checks.def("seeded_dropout", check_seeded_dropout).def("seeded_dropout_add_", check_seeded_dropout_add);
});

}  // namespace liger::python
