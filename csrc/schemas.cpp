// The schemas of all ops in torch.ops.liger_ext. A forward also returns the tensors that its backward needs. Ops are functional, except for
// those whose name ends in _: these overwrite the arguments that are marked with !. An output that was not requested has zero elements.
// Modes are integers here and names in Python:
//   casting_mode 0 llama, 1 gemma, -1 none;  activation 0 silu, 1 gelu by tanh, 2 exact gelu;  reduction 0 none, 1 mean, 2 sum;
//   layout 0 halves, 1 interleaved, 2 interleaved to halves;  code 0 nf4, 1 fp4.
#include "schemas.h"

#include <torch/csrc/stable/library.h>

namespace schemas = liger::schemas;

STABLE_TORCH_LIBRARY(liger_ext, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset, int casting_mode) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, bool need_dx, bool need_dweight)"
      " -> (Tensor dx, Tensor dweight)");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, int casting_mode)"
      " -> (Tensor y, Tensor sum, Tensor rstd)");
  m.def(
      "add_rms_norm_backward(Tensor? dy, Tensor? dsum, Tensor sum, Tensor? weight, Tensor rstd, float offset, bool need_dx,"
      " bool need_dweight) -> (Tensor dx, Tensor dweight)");

  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, ScalarType? bias_dtype, bool need_dx,"
      " bool need_dweight, bool need_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)");

  m.def("group_norm(Tensor x, Tensor? weight, Tensor? bias, int num_groups, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "group_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, ScalarType? bias_dtype, int num_groups,"
      " bool need_dx, bool need_dweight, bool need_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)");

  m.def("glu(Tensor gate, Tensor up, int activation, float gate_multiplier, float down_multiplier) -> Tensor");
  m.def(
      "glu_backward(Tensor dh, Tensor gate, Tensor up, int activation, float gate_multiplier, float down_multiplier)"
      " -> (Tensor dgate, Tensor dup)");
  // Overwrites dh with h, the forward's result, so that a caller that did not keep h needs no memory to recompute it.
  m.def(
      "glu_backward_with_h_(Tensor(a!) dh, Tensor gate, Tensor up, int activation, float gate_multiplier, float down_multiplier)"
      " -> (Tensor dgate, Tensor dup)");
  m.def("glu_packed(Tensor gate_up, int activation, float gate_multiplier, float down_multiplier) -> Tensor");
  m.def("glu_packed_backward(Tensor dh, Tensor gate_up, int activation, float gate_multiplier, float down_multiplier) -> Tensor");

  m.def("relu_squared(Tensor x) -> Tensor");
  m.def("relu_squared_backward(Tensor dy, Tensor x) -> Tensor");

  m.def("rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, int layout, bool half_tables) -> (Tensor q_out, Tensor k_out)");
  m.def("rope_backward(Tensor dq, Tensor? dk, Tensor cos, Tensor sin, int layout, bool half_tables) -> (Tensor dq_in, Tensor dk_in)");

  m.def("softmax(Tensor x) -> Tensor");
  m.def("softmax_backward(Tensor dy, Tensor y) -> Tensor");

  m.def(schemas::cross_entropy);
  m.def(schemas::cross_entropy_backward);

  m.def("jsd(Tensor log_q, Tensor log_p, Tensor? shift_labels, float beta, int ignore_index) -> (Tensor loss, Tensor counts)");
  m.def(
      "jsd_backward(Tensor dloss, Tensor log_q, Tensor log_p, Tensor? shift_labels, Tensor counts, float beta, int ignore_index)"
      " -> Tensor");

  m.def(schemas::fused_linear_cross_entropy);
  m.def(schemas::fused_linear_cross_entropy_backward);
  m.def(schemas::fused_linear_cross_entropy_backward_);
  m.def(schemas::vocabulary_shard_statistics);
  m.def(schemas::vocabulary_shard_losses_);
  m.def(schemas::vocabulary_shard_backward);
  m.def(schemas::vocabulary_shard_backward_);

  m.def(
      "dequantize_4bit(Tensor packed, Tensor absmax, Tensor? absmax_code, Tensor? absmax_scales, Tensor? absmax_offset, int numel,"
      " int code, int blocksize, int absmax_blocksize, ScalarType dtype) -> Tensor");
  // Decodes to `out`, a matrix whose rows may have a stride.
  m.def(
      "dequantize_4bit_to_(Tensor(a!) out, Tensor packed, Tensor absmax, Tensor? absmax_code, Tensor? absmax_scales,"
      " Tensor? absmax_offset, int code, int blocksize, int absmax_blocksize) -> ()");

  // first_row: the number of x's first row in the matrix of which x is a tile (kernels/seeded_dropout.h).
  m.def("seeded_dropout(Tensor x, Tensor seed, int stream, int count, int first_row, float p) -> Tensor");
  m.def("seeded_dropout_add_(Tensor(a!) total, Tensor x, Tensor seed, int stream, int first_row, float p) -> ()");

  // The reference of the benchmarks: a copy at the speed of the memory (kernels/stream_copy.h).
  m.def("stream_copy(Tensor x, int per_thread) -> Tensor");
}
