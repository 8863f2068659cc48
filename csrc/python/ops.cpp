// What the files of liger_ext/ops ask C++: the checks of every op, and what stands in C++ alone.
#include "checks/cross_entropy.h"
#include "checks/fused_linear_cross_entropy.h"
#include "checks/glu.h"
#include "checks/group_norm.h"
#include "checks/jsd.h"
#include "checks/norms.h"
#include "checks/rope.h"
#include "checks/rows.h"
#include "checks/stream_copy.h"
#include "kernels/glu.h"

namespace liger::python {

void bind_ops(py::module_& m) {
  py::module_ checks = m.def_submodule("checks", "For each op a function of the op's arguments, which raises what the op itself would.");
  checks.def("rms_norm", check_rms_norm).def("rms_norm_backward", check_rms_norm_backward);
  checks.def("add_rms_norm", check_add_rms_norm).def("add_rms_norm_backward", check_add_rms_norm_backward);
  checks.def("layer_norm", check_layer_norm).def("layer_norm_backward", check_layer_norm_backward);
  checks.def("group_norm", check_group_norm).def("group_norm_backward", check_group_norm_backward);
  checks.def("glu", check_glu).def("glu_backward", check_glu_backward);
  checks.def("glu_packed", check_glu_packed).def("glu_packed_backward", check_glu_packed_backward);
  checks.def("jsd", check_jsd).def("jsd_backward", check_jsd_backward);
  checks.def("relu_squared", check_relu_squared).def("relu_squared_backward", check_relu_squared_backward);
  checks.def("rope", check_rope).def("rope_backward", check_rope_backward);
  checks.def("softmax", check_softmax).def("softmax_backward", check_softmax_backward);
  checks.def("cross_entropy", check_cross_entropy).def("cross_entropy_backward", check_cross_entropy_backward);
  checks.def("fused_linear_cross_entropy", check_fused_linear_cross_entropy);
  checks.def("fused_linear_cross_entropy_backward", check_fused_linear_cross_entropy_backward);
  checks.def("stream_copy", check_stream_copy);

  m.def("rope_keeps_strides", keeps_strides, "Have rope's outputs the strides of this input? Else they are contiguous.");
  py::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("gelu", Activation::gelu);
  py::enum_<Reduction>(m, "Reduction").value("none", Reduction::none).value("mean", Reduction::mean).value("sum", Reduction::sum);
  m.attr("cross_entropy_counts") = int(CrossEntropyCounts::slots);
}

}  // namespace liger::python
