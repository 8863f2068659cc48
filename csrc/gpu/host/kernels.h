// The list of the library's kernels (names and numbers of launches), and the source lines of an instruction.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace liger::gpu::simt {

struct RegisteredKernel {
  std::string name;
  int64_t launches = 0;
};
std::vector<RegisteredKernel>& registered_kernels();
// Returns the source lines of the instruction before `code`, innermost function first; needs addr2line of binutils, and is empty without
// it.
std::string source_lines(const void* code);

}  // namespace liger::gpu::simt
