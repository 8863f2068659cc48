#include "launch/seeded_dropout.h"

#include "kernels/aligned.h"
#include "launch/elementwise.h"

namespace liger::launch {

Launch op_launch(const DeviceProfile& device, const SeededDropout& op) {
  const bool vectors = aligned(op.x, op.cols) && aligned(op.out, op.cols) && op.cols % seeded_dropout_vec == 0;
  return row_tiles(device, seeded_dropout_kernel, {op.rows, op.cols, vectors ? seeded_dropout_vec : 1, seeded_dropout_k});
}

}  // namespace liger::launch
