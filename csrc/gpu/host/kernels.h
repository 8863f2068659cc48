// What is known of kernels besides their code: their names, how often each was launched, and where an instruction was written.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace liger::gpu::simt {

struct KnownKernel {
  std::string name;
  int64_t launches = 0;
};
std::vector<KnownKernel>& known_kernels();
// Where the instruction before `code` was written, innermost function first, by binutils where they are installed.
std::string source_of(const void* code);

}  // namespace liger::gpu::simt
