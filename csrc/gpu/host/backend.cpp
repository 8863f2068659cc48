// The CPU backend's interface, carried out by the GPU's kernels on the host: the library that this is linked into takes the place of
// liger_ext_cpu, so that every op and every test runs on it. Each function says which memory its kernels may touch, and calls the
// function of the same name in csrc/gpu. Matrix products, a library's work on GPUs, are a plain loop whose sums are double: what is
// tested is what the kernels make of them.
#include <vector>

#include "gpu/device.h"
#include "gpu/host/memory.h"
#include "gpu/platform.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/glu.h"
#include "kernels/layer_norm.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/softmax.h"
#include "kernels/stream_copy.h"

namespace liger::gpu {

// kernels/*.h have declared them for the CPU backend only.
decltype(cpu::rms_norm_forward) rms_norm_forward;
decltype(cpu::rms_norm_backward_workspace) rms_norm_backward_workspace;
decltype(cpu::rms_norm_backward) rms_norm_backward;
decltype(cpu::layer_norm_forward) layer_norm_forward;
decltype(cpu::layer_norm_backward_workspace) layer_norm_backward_workspace;
decltype(cpu::layer_norm_backward) layer_norm_backward;
decltype(cpu::glu_forward) glu_forward;
decltype(cpu::glu_backward) glu_backward;
decltype(cpu::rope) rope;
decltype(cpu::softmax_forward) softmax_forward;
decltype(cpu::softmax_backward) softmax_backward;
decltype(cpu::cross_entropy_counts) cross_entropy_counts;
decltype(cpu::cross_entropy_forward) cross_entropy_forward;
decltype(cpu::cross_entropy_backward) cross_entropy_backward;
decltype(cpu::cross_entropy_in_place) cross_entropy_in_place;
decltype(cpu::cross_entropy_reduce) cross_entropy_reduce;
decltype(cpu::scale_cast) scale_cast;
decltype(cpu::fill_rows) fill_rows;
decltype(cpu::column_sum_workspace) column_sum_workspace;
decltype(cpu::column_sum) column_sum;
decltype(cpu::scalar_product) scalar_product;
decltype(cpu::stream_copy) stream_copy;

}  // namespace liger::gpu

namespace liger::cpu {
namespace {

using gpu::simt::Buffer;
using gpu::simt::Buffers;
using gpu::simt::Content;

Buffer in(const char* name, const void* data, int64_t bytes) { return {name, data, bytes, Content::input}; }
Buffer out(const char* name, const void* data, int64_t bytes, Content content = Content::output) { return {name, data, bytes, content}; }
Buffer in(const char* name, const Vector& v, int64_t n) { return in(name, v.data, n * size_of(v.dtype)); }
Buffer out(const char* name, const MutableVector& v, int64_t n) { return out(name, v.data, n * size_of(v.dtype)); }
// Rows without gaps are one run: a vector may cross from one into the next.
template <class AnyRows> Buffer matrix(const char* name, const AnyRows& r, int64_t rows, int64_t cols, Content content) {
  const int64_t bytes = size_of(r.dtype);
  if (r.stride == cols) return {name, r.data, rows * cols * bytes, content};
  return {name, r.data, cols * bytes, content, {{rows, r.stride * bytes}}};
}
Buffer in(const char* name, const Rows& r, int64_t rows, int64_t cols) { return matrix(name, r, rows, cols, Content::input); }
Buffer out(const char* name, const MutableRows& r, int64_t rows, int64_t cols) { return matrix(name, r, rows, cols, Content::output); }
constexpr int64_t f32 = sizeof(float), i64 = sizeof(int64_t);

}  // namespace

void rms_norm_forward(const RmsNormForward& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols),   in("residual", a.residual, a.rows, a.cols),
                        in("weight", a.weight, a.cols), out("sum", a.sum, a.rows, a.cols),
                        out("y", a.y, a.rows, a.cols),  out("rstd", a.rstd, a.rows * f32)};
  gpu::rms_norm_forward(a, stream);
}
int64_t rms_norm_backward_workspace(const RmsNormBackward& a, Stream stream) { return gpu::rms_norm_backward_workspace(a, stream); }
void rms_norm_backward(const RmsNormBackward& a, Stream stream) {
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols),    in("dsum", a.dsum, a.rows, a.cols),
                        in("z", a.z, a.rows, a.cols),      in("weight", a.weight, a.cols),
                        in("rstd", a.rstd, a.rows * f32),  out("dz", a.dz, a.rows, a.cols),
                        out("dweight", a.dweight, a.cols), out("workspace", a.workspace, gpu::rms_norm_backward_workspace(a, stream))};
  gpu::rms_norm_backward(a, stream);
}

void layer_norm_forward(const LayerNormForward& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols),  in("weight", a.weight, a.cols),    in("bias", a.bias, a.cols),
                        out("y", a.y, a.rows, a.cols), out("mean", a.mean, a.rows * f32), out("rstd", a.rstd, a.rows * f32)};
  gpu::layer_norm_forward(a, stream);
}
int64_t layer_norm_backward_workspace(const LayerNormBackward& a, Stream stream) { return gpu::layer_norm_backward_workspace(a, stream); }
void layer_norm_backward(const LayerNormBackward& a, Stream stream) {
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols),
                        in("x", a.x, a.rows, a.cols),
                        in("weight", a.weight, a.cols),
                        in("mean", a.mean, a.rows * f32),
                        in("rstd", a.rstd, a.rows * f32),
                        out("dx", a.dx, a.rows, a.cols),
                        out("dweight", a.dweight, a.cols),
                        out("dbias", a.dbias, a.cols),
                        out("workspace", a.workspace, gpu::layer_norm_backward_workspace(a, stream))};
  gpu::layer_norm_backward(a, stream);
}

void glu_forward(const GluForward& a, Stream stream) {
  const Buffers buffers{in("gate", a.gate, a.rows, a.cols), in("up", a.up, a.rows, a.cols), out("h", a.h, a.rows, a.cols)};
  gpu::glu_forward(a, stream);
}
void glu_backward(const GluBackward& a, Stream stream) {
  const Buffers buffers{in("dh", a.dh, a.rows, a.cols), in("gate", a.gate, a.rows, a.cols), in("up", a.up, a.rows, a.cols),
                        out("dgate", a.dgate, a.rows, a.cols), out("dup", a.dup, a.rows, a.cols)};
  gpu::glu_backward(a, stream);
}

void rope(const Rope& a, Stream stream) {
  const int64_t bytes = size_of(a.dtype), table = size_of(a.table_dtype);
  const auto heads = [&](const char* name, const void* data, Content content, const RopeHeads& h, int64_t batch, int64_t head,
                         int64_t seq) {
    return Buffer{name, data, a.head_dim * bytes, content, {{a.batch, batch * bytes}, {h.heads, head * bytes}, {a.seq, seq * bytes}}};
  };
  const auto angles = [&](const char* name, const void* data, int64_t batch, int64_t seq) {
    return Buffer{name, data, a.rotary_dim * table, Content::input, {{a.batch, batch * table}, {a.seq, seq * table}}};
  };
  const Buffers buffers{heads("q", a.q.in, Content::input, a.q, a.q.in_batch, a.q.in_head, a.q.in_seq),
                        heads("k", a.k.in, Content::input, a.k, a.k.in_batch, a.k.in_head, a.k.in_seq),
                        heads("q_out", a.q.out, Content::output, a.q, a.q.out_batch, a.q.out_head, a.q.out_seq),
                        heads("k_out", a.k.out, Content::output, a.k, a.k.out_batch, a.k.out_head, a.k.out_seq),
                        angles("cos", a.cos, a.cos_batch, a.cos_seq),
                        angles("sin", a.sin, a.sin_batch, a.sin_seq)};
  gpu::rope(a, stream);
}

void softmax_forward(const SoftmaxForward& a, Stream stream) {
  const Buffers buffers{in("x", a.x, a.rows, a.cols), out("y", a.y, a.rows, a.cols)};
  gpu::softmax_forward(a, stream);
}
void softmax_backward(const SoftmaxBackward& a, Stream stream) {
  const Buffers buffers{in("dy", a.dy, a.rows, a.cols), in("y", a.y, a.rows, a.cols), out("dx", a.dx, a.rows, a.cols)};
  gpu::softmax_backward(a, stream);
}

void cross_entropy_counts(const CrossEntropyCounts& a, Stream stream) {
  const Buffers buffers{in("target", a.target, a.rows * i64), in("weight", a.class_weight, a.vocab), in("normalizer", a.normalizer, f32),
                        out("counts", a.counts, CrossEntropyCounts::slots * f32)};
  gpu::cross_entropy_counts(a, stream);
}

namespace {

// What the passes over logits have in common; `gradient` may be empty, and may lie in the logits' memory.
template <class Op>
Buffers logit_buffers(const Op& a, const CrossEntropyRows& results, const void* lse, const Rows& grad, const MutableRows& gradient) {
  return {in("logits", a.logits, a.rows, a.vocab),
          in("target", a.target, a.rows * i64),
          in("weight", a.class_weight, a.vocab),
          in("counts", a.counts, CrossEntropyCounts::slots * f32),
          in("saved lse", lse, 2 * a.rows * f32),
          in("grad", grad, a.rows, 1),
          out("ce", results.ce, a.rows * f32),
          out("z", results.z, a.rows * f32),
          out("lse", results.lse, 2 * a.rows * f32),
          out("accuracy", results.accuracy, a.rows * f32),
          out("predicted", results.predicted, a.rows * i64),
          out("gradient", gradient, a.rows, a.vocab)};
}

}  // namespace

// A bad target is raised at once, as the CPU does.
void cross_entropy_forward(const CrossEntropyRows& a, Stream stream) {
  const Buffers buffers = logit_buffers(a, a, nullptr, {}, {});
  gpu::cross_entropy_forward(a, stream);
  gpu::raise_reported_targets();
}
void cross_entropy_backward(const CrossEntropyBackward& a, Stream stream) {
  const Buffers buffers = logit_buffers(a, {}, a.lse, a.grad, a.dlogits);
  gpu::cross_entropy_backward(a, stream);
  gpu::raise_reported_targets();
}
void cross_entropy_in_place(const CrossEntropyInPlace& a, Stream stream) {
  const Buffers buffers = logit_buffers(a.row, a.row, nullptr, {}, a.gradient);
  gpu::cross_entropy_in_place(a, stream);
  gpu::raise_reported_targets();
}

void cross_entropy_reduce(const CrossEntropyReduce& a, Stream stream) {
  const int64_t losses = a.reduction == Reduction::none ? a.rows : 1;
  const CrossEntropyCounts counting = a.counting ? *a.counting : CrossEntropyCounts{};
  const Buffers buffers{in("ce", a.ce, a.rows * f32),
                        in("target", counting.target, counting.rows * i64),
                        in("weight", counting.class_weight, counting.vocab),
                        out("counts", counting.counts, CrossEntropyCounts::slots * f32),
                        in("z", a.z, a.rows * f32),
                        in("accuracy", a.accuracy, a.rows * f32),
                        in("counts", a.counts, CrossEntropyCounts::slots * f32),
                        out("loss", a.loss, losses * f32),
                        out("z_loss", a.z_loss, losses * f32),
                        out("token_accuracy", a.token_accuracy, f32)};
  gpu::cross_entropy_reduce(a, stream);
}

void scale_cast(const ScaleCast& a, Stream stream) {
  const Buffers buffers{in("in", a.in, a.rows, a.cols), out("out", a.out, a.rows, a.cols), in("scale", a.scale, f32),
                        in("row_scale", a.row_scale, a.rows, 1)};
  gpu::scale_cast(a, stream);
}
void fill_rows(const FillRows& a, Stream stream) {
  const Buffers buffers{out("matrix", a.matrix, a.rows, a.cols), in("values", a.values, a.cols)};
  gpu::fill_rows(a, stream);
}
int64_t column_sum_workspace(const ColumnSum& a, Stream stream) { return gpu::column_sum_workspace(a, stream); }
void column_sum(const ColumnSum& a, Stream stream) {
  const Buffers buffers{in("in", a.in, a.rows, a.cols), in("row_scale", a.row_scale, a.rows, 1),
                        out("sum", a.sum, a.cols * f32, a.accumulate ? Content::both : Content::output),
                        out("workspace", a.workspace, gpu::column_sum_workspace(a, stream))};
  gpu::column_sum(a, stream);
}
void scalar_product(const ScalarProduct& a, Stream stream) {
  const Buffers buffers{in("a", a.a, 1), in("b", a.b, f32), in("factors", a.factors, a.rows, 1),
                        out("out", a.out, (a.factors.data ? 3 : 1) * f32)};
  gpu::scalar_product(a, stream);
}

void stream_copy(const StreamCopy& a, Stream stream) {
  const Buffers buffers{in("in", a.in, a.bytes), out("out", a.out, a.bytes)};
  gpu::stream_copy(a, stream);
}

void gemm(const Gemm& g, Stream) {
  // As a GPU's library does.
  const auto apart = [](const Matrix& x, int64_t rows, int64_t cols) {
    return x.transposed ? cols <= 1 || x.stride >= rows : rows <= 1 || x.stride >= cols;
  };
  require(apart(g.a, g.m, g.k) && apart(g.b, g.k, g.n) && (g.m <= 1 || g.c_stride >= g.n), "gemm: rows overlap");
  const auto widened = [](const Matrix& x, int64_t rows, int64_t cols) {
    std::vector<float> out(size_t(rows * cols));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        out[i * cols + j] = gpu::load_one(x.data, x.dtype, x.transposed ? j * x.stride + i : i * x.stride + j);
    return out;
  };
  const std::vector<float> a = widened(g.a, g.m, g.k), b = widened(g.b, g.k, g.n);
  const float alpha = g.alpha ? *static_cast<const float*>(g.alpha) : 1;
  std::vector<double> row(static_cast<size_t>(g.n));
  for (int64_t i = 0; i < g.m; ++i) {
    row.assign(row.size(), 0);
    for (int64_t k = 0; k < g.k; ++k)
      for (int64_t j = 0; j < g.n; ++j) row[j] += double{a[i * g.k + k]} * b[k * g.n + j];
    for (int64_t j = 0; j < g.n; ++j) {
      const int64_t at = i * g.c_stride + j;
      gpu::store_one(g.c, g.c_dtype, at, float(alpha * row[j] + (g.accumulate ? gpu::load_one(g.c, g.c_dtype, at) : 0)));
    }
  }
}

}  // namespace liger::cpu
