#include "launch/dequantize_4bit.h"

#include "launch/elementwise.h"
#include "launch/op_plans.h"

namespace liger::launch {

Launch dequantize_4bit(const DeviceProfile& device, int64_t rows, int64_t cols, int vec) {
  Launch launch = row_tiles(device, dequantize_4bit_kernel, {rows, cols, vec, dequantize_4bit_k(vec)});
  launch.plan.smem = 16 * int(sizeof(float));  // the codes
  return launch;
}

// The op that planned_ops() lists (op_plans.h).
namespace {

Launches decoding(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {dequantize_4bit(device, 1, call.rows * call.cols, row_vec(call))};
}

const Planned planned{"dequantize_4bit", decoding, {&dequantize_4bit_kernel}};

}  // namespace
}  // namespace liger::launch
