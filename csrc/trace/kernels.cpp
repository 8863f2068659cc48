// The functions of csrc/kernels for the backend `trace`. They compute nothing: each records its launches (for a GPU) or matmul, if the
// Recorder has lists. Those of the fused loss also add an estimate of their time.
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "launch/arguments.h"
#include "launch/dequantize_4bit.h"
#include "launch/glu.h"
#include "launch/group_norm.h"
#include "launch/jsd.h"
#include "launch/norms.h"
#include "launch/relu_squared.h"
#include "launch/rope.h"
#include "launch/seeded_dropout.h"
#include "launch/softmax.h"
#include "ops/tensor.h"
#include "trace/cost.h"

namespace liger::trace {
namespace {

Recorder& stream_recorder(Stream stream) { return *static_cast<Recorder*>(stream.handle); }

// Returns the launches of an op, with the recorder's knobs if the op takes knobs.
template <class Op> launch::Launches launches(const Op& op, const Recorder& recorder) {
  const launch::DeviceProfile& device = *recorder.gpu;
  if constexpr (requires { launch::op_launches(device, op, recorder.knobs); }) return launch::op_launches(device, op, recorder.knobs);
  else if constexpr (requires { launch::op_launches(device, op); }) return launch::op_launches(device, op);
  else if constexpr (requires { launch::op_launch(device, op, recorder.knobs); }) return {launch::op_launch(device, op, recorder.knobs)};
  else return {launch::op_launch(device, op)};
}
template <class Op> void record(const Op& op, Stream stream) {
  Recorder& recorder = stream_recorder(stream);
  if (!recorder.lists || !recorder.gpu) return;
  for (const launch::Launch& one : launches(op, recorder)) recorder.kernels.push_back({one, recorder.times});
}
// Records an op that is a pass over `bytes` bytes of memory.
template <class Op> void pass(const Op& op, Stream stream, int64_t bytes) {
  Recorder& recorder = stream_recorder(stream);
  recorder.seconds += double(recorder.times) * pass_seconds(recorder.rates, double(bytes));
  record(op, stream);
}
template <class Op> int64_t workspace(const Op& op, Stream stream) {
  const Recorder& recorder = stream_recorder(stream);
  return recorder.gpu ? launch::workspace_bytes(*recorder.gpu, op) : 0;
}
int64_t matrix_bytes(const CrossEntropyRows& row, Dtype dtype) { return row.rows * row.vocab * dtype_bytes(dtype); }

}  // namespace

void cross_entropy_counts(const CrossEntropyCounts& op, Stream stream) { pass(op, stream, op.rows * 8); }

void cross_entropy_forward(const CrossEntropyRows& op, Stream stream) {
  if (op.rows * op.vocab > 0) pass(op, stream, matrix_bytes(op, op.logits.dtype));
}

void cross_entropy_backward(const CrossEntropyBackward& op, Stream stream) {
  if (op.rows * op.vocab > 0) pass(op, stream, 2 * op.rows * op.vocab * dtype_bytes(op.logits.dtype));
}

void cross_entropy_in_place(const CrossEntropyInPlace& op, Stream stream) {
  if (op.row.rows * op.row.vocab > 0) pass(op, stream, 2 * matrix_bytes(op.row, op.row.logits.dtype));
}

bool cross_entropy_takes_chunks(const CrossEntropyInChunks& op, Stream stream) {
  const Recorder& recorder = stream_recorder(stream);
  return recorder.gpu && launch::op_launches(*recorder.gpu, op, recorder.knobs).size() > 0;
}
void cross_entropy_in_chunks(const CrossEntropyInChunks& op, Stream stream) {
  pass(op, stream, 2 * matrix_bytes(op.row, op.row.logits.dtype));
}

void cross_entropy_statistics(const CrossEntropyStatistics& op, Stream stream) {
  if (op.row.rows > 0) pass(op, stream, matrix_bytes(op.row, op.row.logits.dtype));
}
void cross_entropy_merge(const CrossEntropyMerge& op, Stream stream) {
  if (op.row.rows > 0)
    pass(op, stream, op.row.rows * op.chunks * CrossEntropyStatistics::slot_count(op.row.moments()) * dtype_bytes(op.accumulator));
}

void cross_entropy_reduce(const CrossEntropyReduce& op, Stream stream) {
  if (op.counting && op.reduction == Reduction::none) cross_entropy_counts(*op.counting, stream);
  if (op.rows > 0 || op.reduction != Reduction::none) pass(op, stream, op.rows * dtype_bytes(op.accumulator));
}

void scale_cast(const ScaleCast& op, Stream stream) {
  if (op.rows * op.cols > 0) pass(op, stream, op.rows * op.cols * (dtype_bytes(op.in.dtype) + dtype_bytes(op.out.dtype)));
}
void fill_rows(const FillRows& op, Stream stream) {
  if (op.rows * op.cols > 0) pass(op, stream, op.rows * op.cols * dtype_bytes(op.matrix.dtype));
}
int64_t column_sum_workspace(const ColumnSum& op, Stream stream) { return workspace(op, stream); }
void column_sum(const ColumnSum& op, Stream stream) {
  if (op.cols == 0) return;
  Recorder& recorder = stream_recorder(stream);
  recorder.seconds += double(recorder.times) * pass_seconds(recorder.rates, double(op.cols * int64_t{sizeof(float)}));
  pass(op, stream, op.rows * op.cols * dtype_bytes(op.in.dtype));
}
void scalar_product(const ScalarProduct& op, Stream stream) { pass(op, stream, 0); }

void glu_forward(const GluForward& op, Stream stream) { record(op, stream); }
void glu_backward(const GluBackward& op, Stream stream) { record(op, stream); }
void relu_squared_forward(const ReluSquaredForward& op, Stream stream) { record(op, stream); }
void relu_squared_backward(const ReluSquaredBackward& op, Stream stream) { record(op, stream); }
void softmax_forward(const SoftmaxForward& op, Stream stream) { record(op, stream); }
void softmax_backward(const SoftmaxBackward& op, Stream stream) { record(op, stream); }
void jsd_forward(const JsdForward& op, Stream stream) {
  if (op.in.vocab > 0) record(op, stream);
}
void jsd_backward(const JsdBackward& op, Stream stream) {
  if (op.in.vocab > 0) record(op, stream);
}
void rope(const Rope& op, Stream stream) { record(op, stream); }
void seeded_dropout(const SeededDropout& op, Stream stream) { record(op, stream); }
void dequantize_4bit(const Dequantize4bit& op, Stream stream) { record(op, stream); }
void stream_copy(const StreamCopy& op, Stream stream) { record(op, stream); }

int64_t group_norm_forward_workspace(const GroupNormForward& op, Stream stream) { return workspace(op, stream); }
void group_norm_forward(const GroupNormForward& op, Stream stream) { record(op, stream); }
int64_t group_norm_backward_workspace(const GroupNormBackward& op, Stream stream) { return workspace(op, stream); }
void group_norm_backward(const GroupNormBackward& op, Stream stream) { record(op, stream); }

template <bool Centered> void norm_forward(const NormForward<Centered>& op, Stream stream) { record(op, stream); }
template <bool Centered> int64_t norm_backward_workspace(const NormBackward<Centered>& op, Stream stream) { return workspace(op, stream); }
template <bool Centered> void norm_backward(const NormBackward<Centered>& op, Stream stream) { record(op, stream); }
template void norm_forward(const RmsNormForward&, Stream);
template void norm_forward(const LayerNormForward&, Stream);
template int64_t norm_backward_workspace(const RmsNormBackward&, Stream);
template int64_t norm_backward_workspace(const LayerNormBackward&, Stream);
template void norm_backward(const RmsNormBackward&, Stream);
template void norm_backward(const LayerNormBackward&, Stream);

void gemm(const Gemm& op, Stream stream) {
  if (op.m == 0 || op.n == 0) return;
  Recorder& recorder = stream_recorder(stream);
  const int64_t operand = dtype_bytes(op.a.dtype), result = dtype_bytes(op.c_dtype);
  // On a GPU an epilogue mostly adds the bias to a 16-bit result (gpu/gemm.cu); otherwise C is filled with the bias first.
  if (op.bias && !(recorder.gpu && result == 2 && op.k > 0)) return gemm(with_bias_in_c(op, stream), stream);
  recorder.multiplications += recorder.times * op.m * op.n * op.k;
  const int64_t multiplied = op.all_bits && !recorder.gpu ? result : operand;  // cpu/gemm.cpp
  recorder.seconds +=
      double(recorder.times) * matmul_seconds(recorder.rates, double(op.m), double(op.n), double(op.k), multiplied, result, op.accumulate);
  // On a CPU, torch packs 16-bit operands into scratch buffers, in whole blocks.
  const auto blocks = [](int64_t n) { return launch::round_up(n, 64); };
  if (!recorder.gpu && operand == 2) recorder.scratch(2 * blocks(op.k) * (blocks(op.m) + blocks(op.n)) + (1 << 18));
  if (recorder.lists) recorder.matmuls.push_back({op.m, op.n, op.k, operand, result, op.accumulate, recorder.times});
}

}  // namespace liger::trace
