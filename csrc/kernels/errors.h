// Errors as users see them: the text says what was wrong, what was expected, and what to do.
// std::invalid_argument and std::length_error become ValueError in Python, std::out_of_range IndexError, std::bad_alloc MemoryError,
// OutOfMemory torch.OutOfMemoryError, any other a RuntimeError (ops/boxed.cpp).
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace liger {

struct OutOfMemory : std::runtime_error {   // of the device; std::bad_alloc is the host's
  using std::runtime_error::runtime_error;
};

// What torch said of the error that it has just reported by a code; empty where torch is older than 2.13, which keeps it to itself.
std::string torch_said();  // ops/boxed.cpp
inline bool says_out_of_memory(const std::string& cause) {
  for (const char* words : {"out of memory", "not enough memory", "can't allocate memory"})
    if (cause.find(words) != std::string::npos) return true;
  return false;
}

template <class... Parts> std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts> void require(bool ok, const Parts&... parts) {
  if (!ok) throw std::invalid_argument(text(parts...));
}

}  // namespace liger
