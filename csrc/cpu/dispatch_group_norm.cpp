// GroupNorm on the CPU: runs the kernels on threads, and adds the samples' partial rows of dweight and dbias.
#include "cpu/dispatch.h"
#include "cpu/partials.h"
#include "kernels/group_norm.h"

namespace liger::cpu {

int64_t group_norm_forward_workspace(const GroupNormForward&, Stream) { return 0; }
void group_norm_forward(const GroupNormForward& a, Stream) {
  const int64_t rows = a.shape.rows(), cols = a.shape.cols();
  parallel_items(a, rows, cols, {{a.y, rows, cols}});
}

// One partial row per sample: dweight's elements, then dbias's. The kernel writes it even if neither is requested: it is usually small
// compared with x.
int64_t group_norm_backward_workspace(const GroupNormBackward& a, Stream) {
  return a.shape.batch * 2 * a.shape.all_channels() * dtype_bytes(accumulator(a.x.dtype));
}
void group_norm_backward(const GroupNormBackward& a, Stream) {
  const int64_t rows = a.shape.rows(), cols = a.shape.cols(), channels = a.shape.all_channels();
  parallel_items(a, rows, cols, {{a.dx, rows, cols}});
  const Dtype acc = accumulator(a.x.dtype);
  sum_partials(a.workspace, a.shape.batch, 2 * channels, channels, acc, a.dweight);
  sum_partials(static_cast<const char*>(a.workspace) + channels * dtype_bytes(acc), a.shape.batch, 2 * channels, channels, acc, a.dbias);
}

}  // namespace liger::cpu
