// RMSNorm and add+RMSNorm: instantiates the kernels of norm_forward.h and norm_backward.h without a mean.
#include "gpu/norm_backward_launch.h"
#include "gpu/norm_forward.h"

namespace liger::gpu {

template void norm_forward(const RmsNormForward&, Stream);
template int64_t norm_backward_workspace(const RmsNormBackward&, Stream);
template void norm_backward(const RmsNormBackward&, Stream);

}  // namespace liger::gpu
