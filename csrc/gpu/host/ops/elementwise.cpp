#include "kernels/elementwise.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::scale_cast) scale_cast;
decltype(cpu::fill_rows) fill_rows;
decltype(cpu::column_sum_workspace) column_sum_workspace;
decltype(cpu::column_sum) column_sum;
decltype(cpu::scalar_product) scalar_product;
}  // namespace liger::gpu

namespace liger::cpu {

void scale_cast(const ScaleCast& a, Stream stream) {
  const Buffers buffers{in("in", a.in, a.rows, a.cols), out("out", a.out, a.rows, a.cols), in("scale", a.scale, a.rows * a.cols > 0, f32),
                        in("row_scale", a.row_scale, a.cols > 0 ? a.rows : 0, 1)};
  gpu::scale_cast(a, stream);
}
void fill_rows(const FillRows& a, Stream stream) {
  const Buffers buffers{out("matrix", a.matrix, a.rows, a.cols), in("values", a.values, a.cols)};
  gpu::fill_rows(a, stream);
}
int64_t column_sum_workspace(const ColumnSum& a, Stream stream) { return gpu::column_sum_workspace(a, stream); }
void column_sum(const ColumnSum& a, Stream stream) {
  const Buffers buffers{in("in", a.in, a.rows, a.cols), in("row_scale", a.row_scale, a.cols > 0 ? a.rows : 0, 1),
                        out("sum", a.sum, a.cols, f32, a.accumulate ? Content::both : Content::output),
                        workspace(a.workspace, gpu::column_sum_workspace(a, stream))};
  gpu::column_sum(a, stream);
}
void scalar_product(const ScalarProduct& a, Stream stream) {
  const Buffers buffers{in("a", a.a, 1), in("b", a.b, 1, f32), in("factors", a.factors, a.rows, 1),
                        out("out", a.out, a.factors.data ? 3 : 1, f32)};
  gpu::scalar_product(a, stream);
}

}  // namespace liger::cpu
