#include "checks/cross_entropy.h"

#include "python/ops.h"
#include "schemas.h"

namespace liger::python {

const OpBindings cross_entropy_bindings([](py::module_& m, py::module_& checks) {
  checks.def("cross_entropy", &NamedArguments<&check_cross_entropy, schemas::cross_entropy>::run);
  checks.def("cross_entropy_backward", &NamedArguments<&check_cross_entropy_backward, schemas::cross_entropy_backward>::run);
  py::enum_<Reduction>(m, "Reduction").value("none", Reduction::none).value("mean", Reduction::mean).value("sum", Reduction::sum);
  m.attr("cross_entropy_counts") = int(CrossEntropyCounts::slots);
});

}  // namespace liger::python
