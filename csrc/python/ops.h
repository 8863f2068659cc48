// What the files of liger_ext/ops ask C++ of their op: python/ops/<op>.cpp says it.
#pragma once
#include "python/tensor.h"

namespace liger::python {

// `m` is the module _C; `checks` has for each op a function of the op's arguments, which raises what the op itself would.
struct OpBindings {
  explicit OpBindings(void (*bind)(py::module_& m, py::module_& checks));
};

}  // namespace liger::python
