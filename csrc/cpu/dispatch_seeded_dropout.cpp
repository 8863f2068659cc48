// Dropout with a seed on the CPU: divides the rows among threads.
#include "cpu/dispatch.h"
#include "kernels/seeded_dropout.h"

namespace liger::cpu {

// With several masks an item's rows are not neighbours, so their pages are not mapped ahead.
void seeded_dropout(const SeededDropout& a, Stream) {
  parallel_items(a, a.rows, a.cols * a.count, {MappedOutput(a.out, a.add || a.count == 1 ? a.rows : 0, a.cols)});
}

}  // namespace liger::cpu
