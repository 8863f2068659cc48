#include "kernels/stream_copy.h"

#include "checks/stream_copy.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor stream_copy_op(Tensor x, int64_t per_thread) {
  const Scope scope("stream_copy", x);
  const int64_t bytes = x.numel() * dtype_bytes(tensor_dtype(x));
  Tensor out = allocate_like(scope, x);
  if (bytes > 0) stream_copy({bytes, x.data_ptr(), out.data_ptr(), per_thread}, scope);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) { m.impl("stream_copy", boxed<stream_copy_op, check_stream_copy>); }

}  // namespace liger::LIGER_BACKEND
