// Registers Python bindings: a file of python/ops binds the C++ functions that liger_ext/ops calls for an op, or for several related ops.
#pragma once
#include "python/tensor.h"

namespace liger::python {

// `m` is the module _C. `checks` has, for each op, a function of its arguments that raises the op's errors.
struct OpBindings {
  explicit OpBindings(void (*bind)(py::module_& m, py::module_& checks));
};

}  // namespace liger::python
