// The functions of csrc/kernels that the fused loss calls, for the backend `trace`. They compute nothing: each adds an estimate of its time
// to the Recorder and, if the Recorder has lists, records its launch (for a GPU) or matmul there.
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "launch/arguments.h"
#include "ops/tensor.h"
#include "trace/cost.h"

namespace liger::trace {
namespace {

Recorder& stream_recorder(Stream stream) { return *static_cast<Recorder*>(stream.handle); }

// Records a pass over `bytes` bytes of memory.
template <class Launch> void pass(Stream stream, int64_t bytes, Launch launch) {
  Recorder& recorder = stream_recorder(stream);
  recorder.seconds += double(recorder.times) * pass_seconds(recorder.rates, double(bytes));
  if (recorder.lists && recorder.gpu) recorder.kernels.push_back({launch(*recorder.gpu, recorder.knobs), recorder.times});
}
// Returns a function that computes the launch of an op, with the recorder's knobs if the op takes knobs.
template <class Op> auto launch(const Op& op) {
  return [&op](const launch::DeviceProfile& device, const launch::Knobs* knobs) {
    if constexpr (requires { launch::op_launch(device, op, knobs); }) return launch::op_launch(device, op, knobs);
    else return launch::op_launch(device, op);
  };
}
int64_t matrix_bytes(const CrossEntropyRows& row, Dtype dtype) { return row.rows * row.vocab * dtype_bytes(dtype); }

}  // namespace

void cross_entropy_counts(const CrossEntropyCounts& op, Stream stream) { pass(stream, op.rows * 8, launch(op)); }

void cross_entropy_forward(const CrossEntropyRows& op, Stream stream) {
  if (op.rows * op.vocab > 0) pass(stream, matrix_bytes(op, op.logits.dtype), launch(op));
}

void cross_entropy_backward(const CrossEntropyBackward& op, Stream stream) {
  if (op.rows * op.vocab > 0) pass(stream, 2 * op.rows * op.vocab * dtype_bytes(op.logits.dtype), launch(op));
}

void cross_entropy_in_place(const CrossEntropyInPlace& op, Stream stream) {
  if (op.row.rows * op.row.vocab > 0) pass(stream, 2 * matrix_bytes(op.row, op.row.logits.dtype), launch(op));
}

bool cross_entropy_takes_chunks(const CrossEntropyInChunks& op, Stream stream) {
  const Recorder& recorder = stream_recorder(stream);
  return recorder.gpu && launch::op_launch(*recorder.gpu, op, recorder.knobs).has_value();
}
void cross_entropy_in_chunks(const CrossEntropyInChunks& op, Stream stream) {
  pass(stream, 2 * matrix_bytes(op.row, op.row.logits.dtype),
       [&](const launch::DeviceProfile& device, const launch::Knobs* knobs) { return launch::op_launch(device, op, knobs).value(); });
}

void cross_entropy_statistics(const CrossEntropyStatistics& op, Stream stream) {
  if (op.row.rows > 0) pass(stream, matrix_bytes(op.row, op.row.logits.dtype), launch(op));
}
void cross_entropy_merge(const CrossEntropyMerge& op, Stream stream) {
  if (op.row.rows > 0)
    pass(stream, op.row.rows * op.chunks * CrossEntropyStatistics::slot_count(op.row.moments()) * dtype_bytes(op.accumulator), launch(op));
}

void cross_entropy_reduce(const CrossEntropyReduce& op, Stream stream) {
  if (op.counting && op.reduction == Reduction::none) cross_entropy_counts(*op.counting, stream);
  if (op.rows > 0 || op.reduction != Reduction::none) pass(stream, op.rows * dtype_bytes(op.accumulator), launch(op));
}

void scale_cast(const ScaleCast& op, Stream stream) {
  if (op.rows * op.cols > 0) pass(stream, op.rows * op.cols * (dtype_bytes(op.in.dtype) + dtype_bytes(op.out.dtype)), launch(op));
}
void fill_rows(const FillRows& op, Stream stream) {
  if (op.rows * op.cols > 0) pass(stream, op.rows * op.cols * dtype_bytes(op.matrix.dtype), launch(op));
}
int64_t column_sum_workspace(const ColumnSum& op, Stream stream) {
  const Recorder& recorder = stream_recorder(stream);
  return recorder.gpu ? launch::column_sum_bytes(launch::op_launch(*recorder.gpu, op)) : 0;
}
void column_sum(const ColumnSum& op, Stream stream) {
  if (op.cols == 0) return;
  pass(stream, op.rows * op.cols * dtype_bytes(op.in.dtype), launch(op));
  pass(stream, op.cols * int64_t{sizeof(float)}, [&](const launch::DeviceProfile& device, const launch::Knobs*) {
    return launch::sum_columns(device, launch::op_launch(device, op).plan.partial_rows, op.cols, 0);
  });
}
void scalar_product(const ScalarProduct& op, Stream stream) { pass(stream, 0, launch(op)); }

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
