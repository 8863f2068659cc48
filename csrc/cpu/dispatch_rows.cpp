// The row ops on the CPU (norms, gated activations, rope, softmax): cuts each op into items and runs its kernel on threads.
#include "cpu/dispatch.h"
#include "cpu/partials.h"
#include "kernels/glu.h"
#include "kernels/norms.h"
#include "kernels/rope.h"
#include "kernels/softmax.h"

namespace liger::cpu {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void sum_partials(const void* partials, int64_t blocks, int64_t stride, int64_t cols, Dtype accumulator, MutableVector out) {
  if (!out.data) return;
  const SumPartials sum{partials, blocks, stride, cols, accumulator, out};
  parallel_items(sum, ceil_div(cols, partial_columns), blocks * partial_columns);
}

// The number of rows of a block; the rows of a block share a partial row. About 128 blocks suffice for the threads of a large machine, and
// keep the partial rows few compared with the rows. A small problem has few blocks. A block has at most 32 rows, even if there are
// then more than 128 blocks: rounding errors grow with the number of rows that are added in sequence.
int64_t rows_per_block(int64_t rows, int64_t cols) {
  const int64_t enough = std::max({int64_t{4}, ceil_div(rows, 128), ceil_div(elements_per_task, std::max<int64_t>(1, cols))});
  return std::min<int64_t>(enough, 32);
}

template <bool Centered> void norm_forward(const NormForward<Centered>& a, Stream) {
  parallel_items(a, a.rows, a.cols, {{a.y, a.rows, a.cols}, {a.sum, a.rows, a.cols}});
}

// The partial rows of a block: dweight's, then dbias's.
template <bool Centered> int64_t norm_backward_workspace(const NormBackward<Centered>& a, Stream) {
  if (!a.dweight.data && !a.dbias.data) return 0;
  return ceil_div(a.rows, rows_per_block(a.rows, a.cols)) * (Centered ? 2 : 1) * a.cols * dtype_bytes(accumulator(a.z.dtype));
}

template <bool Centered> void norm_backward(const NormBackward<Centered>& a, Stream) {
  const int64_t block_rows = rows_per_block(a.rows, a.cols), blocks = ceil_div(a.rows, block_rows), stride = (Centered ? 2 : 1) * a.cols;
  parallel_items(a, blocks, block_rows * a.cols, {{a.dz, a.rows, a.cols, block_rows}});
  const Dtype acc = accumulator(a.z.dtype);
  sum_partials(a.workspace, blocks, stride, a.cols, acc, a.dweight);
  if (a.dbias.data) sum_partials(static_cast<const char*>(a.workspace) + a.cols * dtype_bytes(acc), blocks, stride, a.cols, acc, a.dbias);
}

template void norm_forward(const RmsNormForward&, Stream);
template int64_t norm_backward_workspace(const RmsNormBackward&, Stream);
template void norm_backward(const RmsNormBackward&, Stream);
template void norm_forward(const LayerNormForward&, Stream);
template int64_t norm_backward_workspace(const LayerNormBackward&, Stream);
template void norm_backward(const LayerNormBackward&, Stream);

void glu_forward(const GluForward& a, Stream) { parallel_elements<&GluForward::gate, &GluForward::up, &GluForward::h>(a); }
void glu_backward(const GluBackward& a, Stream) {
  constexpr auto dh = &GluBackward::dh, gate = &GluBackward::gate, up = &GluBackward::up;
  constexpr auto dgate = &GluBackward::dgate, dup = &GluBackward::dup;
  if (a.h.data) parallel_elements<dh, gate, up, dgate, dup, &GluBackward::h>(a);
  else parallel_elements<dh, gate, up, dgate, dup>(a);
}

void rope(const Rope& a, Stream) { parallel_items(a, a.batch * a.seq, (a.q.heads + a.k.heads) * a.head_dim); }

void softmax_forward(const SoftmaxForward& a, Stream) { parallel_items(a, a.rows, a.cols, {{a.y, a.rows, a.cols}}); }
void softmax_backward(const SoftmaxBackward& a, Stream) { parallel_items(a, a.rows, a.cols, {{a.dx, a.rows, a.cols}}); }

}  // namespace liger::cpu
