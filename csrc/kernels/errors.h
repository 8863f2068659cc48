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

template <class... Parts> std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts> void require(bool ok, const Parts&... parts) {
  if (!ok) throw std::invalid_argument(text(parts...));
}

}  // namespace liger
