// LayerNorm: instantiates the kernels of norm_forward.h and norm_backward.h with a mean and a bias.
#include "gpu/norm_backward_launch.h"
#include "gpu/norm_forward.h"

namespace liger::gpu {

template void norm_forward(const LayerNormForward&, Stream);
template int64_t norm_backward_workspace(const LayerNormBackward&, Stream);
template void norm_backward(const LayerNormBackward&, Stream);

}  // namespace liger::gpu
