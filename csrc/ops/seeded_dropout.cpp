#include "kernels/seeded_dropout.h"

#include <cmath>

#include "checks/seeded_dropout.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

void run(const Scope& scope, const Tensor& x, const MutableRows& out, bool add, const Tensor& seed, int64_t stream, int64_t count,
         int64_t first_row, double p) {
  if (x.numel() == 0) return;
  const RowsView rows = as_rows(scope, x);
  // The rate at which elements are kept is that of the rounded threshold. If it is 0, no element is scaled.
  const auto threshold = uint32_t(std::lround(p * 65536));
  const double scale = threshold < 65536 ? 65536.0 / (65536 - threshold) : 0;
  const auto* const number = static_cast<const int64_t*>(seed.data_ptr());
  const int64_t each = add ? rows.rows / count : rows.rows;
  seeded_dropout({each, rows.cols, count, rows, out, add, number, uint32_t(stream), first_row, threshold, scale}, scope);
}

Tensor seeded_dropout_op(Tensor x, Tensor seed, int64_t stream, int64_t count, int64_t first_row, double p) {
  const Scope scope("seeded_dropout", x);
  Tensor out = allocate(scope, {count, x.size(0), x.size(1)}, tensor_dtype(x), x);
  run(scope, x, mutable_rows(out), false, seed, stream, count, first_row, p);
  return out;
}

void seeded_dropout_add_op(Tensor total, Tensor x, Tensor seed, int64_t stream, int64_t first_row, double p) {
  const Scope scope("seeded_dropout_add_", x);
  require_apart(scope, total, "total", x, "x");
  run(scope, x, {total.data_ptr(), total.stride(0), tensor_dtype(total)}, true, seed, stream, x.size(0), first_row, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("seeded_dropout", boxed<seeded_dropout_op, check_seeded_dropout>);
  m.impl("seeded_dropout_add_", boxed<seeded_dropout_add_op, check_seeded_dropout_add>);
}

}  // namespace liger::LIGER_BACKEND
