#include "kernels/stream_copy.h"

#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor stream_copy_op(Tensor x, int64_t per_thread) {
  const Scope scope("stream_copy", x, "x");
  const int64_t bytes = x.numel() * size_of(dtype_of(x, "x"));
  require(x.is_contiguous() && bytes % 16 == 0, scope.op(), ": x must be contiguous and a multiple of 16 bytes long");
  require(per_thread == 1 || per_thread == 2 || per_thread == 4 || per_thread == 8, scope.op(), ": per_thread is ", per_thread,
          ", expected 1, 2, 4 or 8");
  Tensor out = allocate_like(scope, x);
  if (bytes > 0) stream_copy({bytes, x.data_ptr(), out.data_ptr(), per_thread}, scope);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) { m.impl("stream_copy", boxed<stream_copy_op>); }

}  // namespace liger::LIGER_BACKEND
