#include "launch/glu.h"

#include "kernels/aligned.h"
#include "launch/elementwise.h"

namespace liger::launch {

Launch op_launch(const DeviceProfile& device, const GluForward& op, const Knobs* knobs) {
  const auto [vec, contiguous] = elementwise(op.rows, op.cols, op.gate.dtype, op.gate, op.up, op.h);
  const Tunable tunable = op.activation == Activation::silu ? Tunable("swiglu") : Tunable("geglu");
  return row_tiles(device, glu_forward, {op.rows, op.cols, vec, glu_k, false, contiguous}, tunable, knobs);
}

Launch op_launch(const DeviceProfile& device, const GluBackward& op, const Knobs* knobs) {
  const auto [vec, contiguous] = elementwise(op.rows, op.cols, op.gate.dtype, op.dh, op.gate, op.up, op.dgate, op.dup, op.h);
  const Tunable tunable = op.activation == Activation::silu ? Tunable("swiglu_backward") : Tunable("geglu_backward");
  return row_tiles(device, glu_backward, {op.rows, op.cols, vec, glu_k, false, contiguous}, tunable, knobs);
}

}  // namespace liger::launch
