// The launches of the fused loss for op_plans.h, read from a trace of the call (fused_loss.h). The chunks between the first and the last
// are equal and are listed once.
#include <algorithm>

#include "launch/cross_entropy.h"
#include "launch/elementwise.h"
#include "launch/losses.h"
#include "trace/fused_loss.h"

namespace liger::launch {
namespace {

const Fact hidden{"hidden", 1}, chunk_rows{"chunk_rows"}, chunk_classes{"chunk_classes"};  // chunk_*: 0 for a single chunk
const Fact overlaid{"overlaid"};  // the strategy overlaid, which stores the gradients of chunk_classes classes
const Fact moments{"moments"};  // of log-probabilities: the entropy, the mean logit and the sum of squares

trace::LossPlan loss_plan(const Call& call, const trace::LossCall& loss_call) {
  trace::LossPlan plan;
  plan.rows = call[chunk_rows] > 0 ? call[chunk_rows] : std::max<int64_t>(1, call.rows);
  plan.classes = call[chunk_classes] > 0 ? call[chunk_classes] : call.cols;
  if (call[overlaid] && call.rows > 0) plan.gradients = Gradients::overlaid;
  else
    plan.gradients =
        gradient_strategy(loss_call.dx, loss_call.dweight, call.rows <= plan.rows && call.cols <= plan.classes, loss_call.per_row);
  return plan;
}

// Traces a call with all gradients, and returns the launches of its forward or of its backward.
Launches traced(const DeviceProfile& device, const Call& call, bool backward) {
  trace::LossCall loss_call{.rows = call.rows, .hidden = call[hidden], .vocab = call.cols};
  loss_call.compute = loss_call.x = loss_call.weight = call.element_bytes == 2 ? Dtype::bf16 : Dtype::f32;
  if (call[bias]) loss_call.bias = loss_call.compute, loss_call.dbias = true;
  loss_call.per_row = call[per_row] != 0;
  loss_call.softcap = call[full] != 0;
  loss_call.moments = call[moments] != 0;
  loss_call.aligned = call.aligned;
  const Rates rates = device_rates(&device);
  trace::Recorder recorder(&device, rates, true);
  recorder.knobs = &call.knobs;
  const size_t forward_kernels = trace_fused_loss(loss_call, loss_plan(call, loss_call), recorder).kernels;
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
