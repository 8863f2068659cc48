// The reference of the benchmarks: a plain copy as fast as the memory allows. The efficiency of an op that is bound by memory is the time
// of a copy of the same number of bytes, divided by the op's time.
#pragma once
#include "kernels/types.h"

namespace liger {

struct StreamCopy {
  int64_t bytes;     // a multiple of 16
  const void* in;
  void* out;
  int64_t per_thread;   // 16-byte vectors that a GPU thread has in flight: 1, 2, 4 or 8; the CPU ignores it
};

namespace LIGER_BACKEND {
void stream_copy(const StreamCopy&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
