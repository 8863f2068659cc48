// All kernels, with their instances. Tests compare this list with the compiled libraries and with the launches of all ops.
#include "launch/cross_entropy.h"
#include "launch/dequantize_4bit.h"
#include "launch/elementwise.h"
#include "launch/glu.h"
#include "launch/group_norm.h"
#include "launch/jsd.h"
#include "launch/norms.h"
#include "launch/relu_squared.h"
#include "launch/rope.h"
#include "launch/seeded_dropout.h"
#include "launch/softmax.h"

namespace liger::launch {

std::span<const Kernel* const> kernels() {
  static constexpr const Kernel* all[] = {&fill_kernel,
                                          &scale_kernel,
                                          &partial_columns_kernel,
                                          &sum_columns_kernel,
                                          &product_kernel,
                                          &stream_copy_kernel,
                                          &cross_entropy_forward_kernel,
                                          &cross_entropy_backward_kernel,
                                          &in_place_held,
                                          &in_place_log_probs,
                                          &in_place_kernel,
                                          &statistics_kernel,
                                          &merge_kernel,
                                          &count_targets_kernel,
                                          &sum_losses_kernel,
                                          &add_losses_kernel,
                                          &norm_forward_registers,
                                          &norm_forward_two_pass,
                                          &norm_backward_rows,
                                          &norm_backward_few,
                                          &norm_backward_registers,
                                          &norm_backward_means,
                                          &norm_backward_tiles,
                                          &group_norm_registers,
                                          &group_norm_held,
                                          &group_norm_moments,
                                          &group_norm_apply,
                                          &group_norm_backward_registers,
                                          &group_norm_backward_held,
                                          &group_norm_backward_sums,
                                          &group_norm_backward_apply,
                                          &softmax_registers,
                                          &softmax_long,
                                          &softmax_backward_registers,
                                          &softmax_backward_long,
                                          &glu_forward,
                                          &glu_backward,
                                          &relu_squared_forward,
                                          &relu_squared_backward,
                                          &rope_kernel,
                                          &rope_interleaved_kernel,
                                          &jsd_forward_kernel,
                                          &jsd_backward_kernel,
                                          &seeded_dropout_kernel,
                                          &dequantize_4bit_kernel};
  return all;
}

}  // namespace liger::launch
