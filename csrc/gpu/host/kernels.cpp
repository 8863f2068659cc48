#include "gpu/host/kernels.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gpu/host/simt.h"
#include "kernels/errors.h"

namespace liger::gpu::simt {

std::vector<RegisteredKernel>& registered_kernels() {
  static std::vector<RegisteredKernel> all;
  return all;
}

int register_kernel(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  registered_kernels().push_back({readable ? readable.get() : name});
  return int(registered_kernels().size()) - 1;
}

std::string source_lines(const void* code) {
  Dl_info image;
  if (code == nullptr || dladdr(code, &image) == 0) return "";
  char offset[32];
  std::snprintf(offset, sizeof(offset), "%tx", static_cast<const char*>(code) - static_cast<const char*>(image.dli_fbase) - 1);
  std::string lines;
  if (FILE* const pipe = popen(text("addr2line -ise '", image.dli_fname, "' ", offset, " 2>/dev/null").c_str(), "r")) {
    char line[4096];
    while (std::fgets(line, sizeof(line), pipe))
      lines += text(lines.empty() ? "\n  at " : ", in ", std::string(line, std::strcspn(line, " \n")));
    pclose(pipe);
  }
  return lines;
}

}  // namespace liger::gpu::simt

// Returns a line for each kernel: how often it was launched, and its name.
extern "C" [[gnu::visibility("default")]] const char* liger_ext_host_kernels() {
  static std::string lines;
  lines.clear();
  for (const auto& kernel : liger::gpu::simt::registered_kernels()) lines += liger::text(kernel.launches, " ", kernel.name, "\n");
  return lines.c_str();
}
