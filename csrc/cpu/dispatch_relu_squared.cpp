#include "cpu/dispatch.h"
#include "kernels/relu_squared.h"

namespace liger::cpu {

void relu_squared_forward(const ReluSquaredForward& a, Stream) { parallel_items(a, a.rows, a.cols, {{a.y, a.rows, a.cols}}); }
void relu_squared_backward(const ReluSquaredBackward& a, Stream) { parallel_items(a, a.rows, a.cols, {{a.dx, a.rows, a.cols}}); }

}  // namespace liger::cpu
