// Checks of the arguments of stream_copy.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_stream_copy(const Tensor& x, int64_t per_thread) {
  const char* op = "stream_copy";
  check_defined(op, x, "x");
  require(x.numel() * dtype_bytes(check_dtype(op, x, "x")) % 16 == 0 && x.is_contiguous(), op,
          ": x is not contiguous or has another size, expected a contiguous tensor of a multiple of 16 bytes");
  require(per_thread == 1 || per_thread == 2 || per_thread == 4 || per_thread == 8, op, ": per_thread is ", per_thread,
          ", expected 1, 2, 4 or 8");
}

}  // namespace liger::LIGER_BACKEND
