#include "launch/relu_squared.h"

#include "kernels/aligned.h"
#include "launch/elementwise.h"

namespace liger::launch {

Launch op_launch(const DeviceProfile& device, const ReluSquaredForward& op, const Knobs* knobs) {
  const auto [vec, contiguous] = elementwise(op.rows, op.cols, op.x.dtype, op.x, op.y);
  return row_tiles(device, relu_squared_forward, {op.rows, op.cols, vec, relu_squared_k, false, contiguous}, "relu_squared", knobs);
}

Launch op_launch(const DeviceProfile& device, const ReluSquaredBackward& op, const Knobs* knobs) {
  const auto [vec, contiguous] = elementwise(op.rows, op.cols, op.x.dtype, op.dy, op.x, op.dx);
  return row_tiles(device, relu_squared_backward, {op.rows, op.cols, vec, relu_squared_k, false, contiguous}, "relu_squared_backward",
                   knobs);
}

}  // namespace liger::launch
