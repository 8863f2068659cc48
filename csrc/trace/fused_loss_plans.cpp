// The launches of the fused loss for op_plans.h, read from a trace of the call (fused_loss.h). The chunks between the first and the last
// are equal and are listed once.
#include <algorithm>

#include "checks/fused_linear_cross_entropy.h"
#include "launch/cross_entropy.h"
#include "launch/elementwise.h"
#include "launch/losses.h"
#include "trace/fused_loss.h"

namespace liger::launch {
namespace {

const Fact hidden{"hidden", 1}, chunk_rows{"chunk_rows"}, chunk_classes{"chunk_classes"};  // chunk_*: 0 for a single chunk
const Fact overlaid{"overlaid"};  // the strategy overlaid, which stores the gradients of chunk_classes classes
const Fact moments{"moments"};  // of log-probabilities: the entropy, the mean logit and the sum of squares

// Traces a call with all gradients, and returns the launches of its forward or of its backward.
Launches traced(const DeviceProfile& device, const Call& call, bool backward) {
  const Rates rates = device_rates(&device);
  trace::Recorder recorder(&device, rates, true);
  recorder.knobs = &call.knobs;
  const Dtype dtype = call.element_bytes == 2 ? Dtype::bf16 : Dtype::f32;
  recorder.offset = call.aligned ? 0 : dtype_bytes(dtype);
  recorder.counts = false;
  const auto tensor = [&](const std::vector<int64_t>& sizes, trace::ScalarType type) {
    const std::array<int64_t, 2> strides{sizes.back(), 1};
    return trace::Tensor(recorder, sizes, std::span(strides).last(sizes.size()), type);
  };
  trace::FusedLoss args;
  args.x = tensor({call.rows, call[hidden]}, trace::scalar_type(dtype));
  args.weight = tensor({call.cols, call[hidden]}, trace::scalar_type(dtype));
  args.target = tensor({call.rows}, trace::ScalarType::Long);
  if (call[bias]) args.bias = tensor({call.cols}, trace::scalar_type(dtype));
  recorder.counts = true;
  args.reduction = int64_t(call[per_row] ? Reduction::none : Reduction::mean);
  if (call[full]) args.softcap = 30;
  args.return_entropy = args.return_mean_logits = args.return_log_sum_sq = call[moments] != 0;
  args.need_dx = args.need_dweight = true;
  args.need_dbias = call[bias] != 0;
  args.chunk_rows = call[chunk_rows] > 0 ? call[chunk_rows] : std::max<int64_t>(1, call.rows);
  args.chunk_classes = call[chunk_classes] > 0 ? call[chunk_classes] : call.cols;
  const bool at_once = call.rows <= args.chunk_rows && call.cols <= args.chunk_classes;
  args.gradients = int64_t(call[overlaid] && call.rows > 0 ? Gradients::overlaid : gradient_strategy(true, true, at_once, call[per_row]));
  const size_t forward_kernels = trace_fused_loss(args, true, recorder).kernels;
  Launches out;
  const auto& all = recorder.kernels;
  for (size_t i = backward ? forward_kernels : 0; i < (backward ? all.size() : forward_kernels); ++i) out.push_back(all[i].launch);
  return out;
}
Launches fused_loss(const DeviceProfile& device, const Call& call) { return traced(device, call, false); }
Launches fused_loss_gradient(const DeviceProfile& device, const Call& call) { return traced(device, call, true); }

const Planned forward{"fused_linear_cross_entropy",
                      fused_loss,
                      {&fill_kernel, &in_place_held, &in_place_tokens, &in_place_kernel, &cross_entropy_forward_kernel, &statistics_kernel,
                       &merge_kernel, &cross_entropy_backward_kernel, &scale_kernel, &count_targets_kernel, &sum_losses_kernel,
                       &add_losses_kernel, &partial_columns_kernel, &sum_columns_kernel}};
const Planned backward{"fused_linear_cross_entropy_backward",
                       fused_loss_gradient,
                       {&product_kernel, &scale_kernel, &fill_kernel, &in_place_held, &in_place_kernel, &statistics_kernel, &merge_kernel,
                        &cross_entropy_backward_kernel, &partial_columns_kernel, &sum_columns_kernel}};

}  // namespace
}  // namespace liger::launch
