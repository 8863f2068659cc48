#include "launch/seeded_dropout.h"

#include "launch/elementwise.h"
#include "launch/op_plans.h"

namespace liger::launch {

Launch seeded_dropout(const DeviceProfile& device, int64_t rows, int64_t cols, bool aligned) {
  const int vec = aligned && cols % seeded_dropout_vec == 0 ? seeded_dropout_vec : 1;
  return row_tiles(device, seeded_dropout_kernel, {rows, cols, vec, seeded_dropout_k});
}

// The op that planned_ops() lists (op_plans.h).
namespace {

Launches dropout(const DeviceProfile& device, const Call& call) {
  if (empty(call)) return {};
  return {seeded_dropout(device, call.rows, call.cols, call.aligned)};
}

const Planned planned{"seeded_dropout", dropout, {&seeded_dropout_kernel}};

}  // namespace
}  // namespace liger::launch
