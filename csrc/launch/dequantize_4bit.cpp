#include "launch/dequantize_4bit.h"

#include "kernels/aligned.h"
#include "launch/elementwise.h"

namespace liger::launch {

Launch op_launch(const DeviceProfile& device, const Dequantize4bit& op) {
  const bool are_aligned = aligned(op.out, op.cols) && reinterpret_cast<uintptr_t>(op.packed) % 4 == 0;
  const int vec = are_aligned ? int(16 / dtype_bytes(op.out.dtype)) : 1;
  Launch launch = row_tiles(device, dequantize_4bit_kernel, {op.rows, op.cols, vec, dequantize_4bit_k(vec)});
  launch.plan.smem = 16 * int(sizeof(float));  // the codes
  return launch;
}

}  // namespace liger::launch
