// Implements Buffer (memory.h): tests whether an offset belongs to a buffer, and describes an offset for messages.
#include <algorithm>

#include "gpu/host/memory.h"
#include "kernels/errors.h"

namespace liger::gpu::simt {

bool Buffer::empty() const {
  return data == nullptr || bytes <= 0 ||
         std::any_of(std::begin(dimensions), std::end(dimensions), [](Dimension d) { return d.count <= 0; });
}
int64_t Buffer::extent() const {
  int64_t end = bytes;
  for (const Dimension& d : dimensions) end += (d.count - 1) * d.stride;
  return end;
}
// Returns whether one run contains the bytes. Rows may overlap, so several indices may reach an offset: tries all, the largest first.
static bool reaches(const Dimension* d, const Dimension* end, int64_t offset, int64_t size, int64_t bytes) {
  if (d == end) return offset + size <= bytes;
  for (int64_t i = d->stride > 0 ? std::min(offset / d->stride, d->count - 1) : 0; i >= 0; --i)
    if (reaches(d + 1, end, offset - i * d->stride, size, bytes)) return true;
  return false;
}
bool Buffer::holds(int64_t offset, int64_t size) const {
  return offset >= 0 && reaches(std::begin(dimensions), std::end(dimensions), offset, size, bytes);
}

std::string Buffer::at(int64_t offset) const {
  std::string words = text("at ", name, " + ", offset, " (", bytes, " bytes");
  for (const Dimension& d : dimensions)
    if (d.count > 1) words += text(", ", d.count, " times ", d.stride, " apart");
  if (row > 0) words += text("; row ", offset / row, ", column ", offset % row / element);
  return words + ")";
}

}  // namespace liger::gpu::simt
