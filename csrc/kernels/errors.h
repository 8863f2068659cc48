// Errors as users see them: the text says what was wrong, what was expected, and what to do.
// std::invalid_argument becomes ValueError in Python, std::out_of_range IndexError, std::bad_alloc MemoryError,
// std::runtime_error RuntimeError.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace liger {

template <class... Parts> std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts> void require(bool ok, const Parts&... parts) {
  if (!ok) throw std::invalid_argument(text(parts...));
}

}  // namespace liger
