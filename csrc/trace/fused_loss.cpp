#include "trace/fused_loss.h"

#include "ops/fused_linear_cross_entropy.h"
#include "schemas.h"

namespace liger::trace {
ForwardWork trace_fused_loss(FusedLoss args, bool in_place, Recorder& recorder) {
  check_fused_linear_cross_entropy(args);
  const FusedLossResults results = fused_loss(args);
  const ForwardWork forward{recorder.kernels.size(), recorder.multiplications};
  const auto strategy = launch::Gradients(args.gradients);
  if (strategy == launch::Gradients::none) return forward;
  args.counts = results.counts;
  args.saved = results.saved;
  args.dx = results.dx;
  args.dweight = results.dweight;
  args.dbias = results.dbias;
  // Autograd passes the upstream gradient: one number, or a tensor with one number for each row.
  args.dloss = allocate_like({"fused_linear_cross_entropy_backward", args.x}, results.loss);
  const bool sums = strategy == launch::Gradients::accumulated || strategy == launch::Gradients::overlaid;
  fused_loss_gradients(args, in_place && sums && args.need_dweight);
  return forward;
}

ForwardWork trace_fused_loss(std::span<const Argument> arguments, const LossPlan& plan, bool in_place, Recorder& recorder) {
  recorder.counts = false;
  FusedLoss args = NamedArguments<&check_fused_linear_cross_entropy, schemas::fused_linear_cross_entropy>::collect(
      [&](size_t index, auto& member) { store(arguments[index], member, recorder); });
  recorder.counts = true;
  args.gradients = plan[0];
  args.chunk_rows = plan[1];
  args.chunk_classes = plan[2];
  return trace_fused_loss(std::move(args), in_place, recorder);
}

}  // namespace liger::trace
