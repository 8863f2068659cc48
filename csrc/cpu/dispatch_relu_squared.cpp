// Squared ReLU on the CPU: runs the kernels on threads.
#include "cpu/dispatch.h"
#include "kernels/relu_squared.h"

namespace liger::cpu {

void relu_squared_forward(const ReluSquaredForward& a, Stream) { parallel_elements<&ReluSquaredForward::x, &ReluSquaredForward::y>(a); }
void relu_squared_backward(const ReluSquaredBackward& a, Stream) {
  parallel_elements<&ReluSquaredBackward::dy, &ReluSquaredBackward::x, &ReluSquaredBackward::dx>(a);
}

}  // namespace liger::cpu
