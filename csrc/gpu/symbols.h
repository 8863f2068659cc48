// Functions of libraries that torch has loaded, looked up while the process runs. Plain C++.
#pragma once
#include <dlfcn.h>

namespace liger::gpu {

// The function of this name as the library that has `neighbour` finds it: its own, or one of a library that it was linked to; or nullptr.
// A process may have several libraries with such a function, of other major versions, and the first of all may be any of them: that one
// is found beside nullptr.
inline void* find_symbol(const void* neighbour, const char* name) {
  if (neighbour == nullptr) return dlsym(RTLD_DEFAULT, name);
  Dl_info place;
  void* const library = dladdr(neighbour, &place) != 0 ? dlopen(place.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
  if (library == nullptr) return nullptr;
  void* const found = dlsym(library, name);
  dlclose(library);  // its user keeps it
  return found;
}

}  // namespace liger::gpu
