// Exceptions of the C++ code and their messages. A message names what was passed, what is expected, and what to do.
// std::out_of_range becomes IndexError in Python, any other std::logic_error (std::invalid_argument, std::length_error) ValueError,
// std::bad_alloc MemoryError, OutOfMemory torch.OutOfMemoryError, any other exception a RuntimeError (ops/boxed.cpp).
#pragma once
#include <charconv>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace liger {

struct OutOfMemory : std::runtime_error {   // the device is out of memory; std::bad_alloc: the host is
  using std::runtime_error::runtime_error;
};

// torch's message for the error that it has just reported as a code; empty with torch before 2.13, which does not expose the message.
std::string torch_error_text();  // ops/boxed.cpp
inline bool is_memory_error(const std::string& cause) {
  for (const char* words : {"out of memory", "not enough memory", "can't allocate memory"})
    if (cause.find(words) != std::string::npos) return true;
  return false;
}

// Messages are built without streams: a stream's output depends on the program's locale, and streams crash where libstdc++ is linked into
// this library a second time.
inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
template <class Number>
  requires std::is_arithmetic_v<Number>
void append(std::string& text, Number number) {
  char digits[32];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), +number).ptr);
}
template <class... Parts> std::string text(const Parts&... parts) {
  std::string all;
  (append(all, parts), ...);
  return all;
}

template <class... Parts> void require(bool ok, const Parts&... parts) {
  if (!ok) throw std::invalid_argument(text(parts...));
}

}  // namespace liger
