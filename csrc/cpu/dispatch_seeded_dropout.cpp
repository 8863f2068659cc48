// Dropout with a seed on the CPU: divides the rows among threads.
#include "cpu/dispatch.h"
#include "kernels/seeded_dropout.h"

namespace liger::cpu {

void seeded_dropout(const SeededDropout& a, Stream) { parallel_items(a, a.rows, a.cols, {MappedOutput(a.out, a.rows, a.cols)}); }

}  // namespace liger::cpu
