#include "checks/stream_copy.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings stream_copy_bindings([](py::module_&, py::module_& checks) { checks.def("stream_copy", check_stream_copy); });

}  // namespace liger::python
