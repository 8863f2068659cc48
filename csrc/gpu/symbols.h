// Looks up functions of libraries that torch has loaded, by name at run time. Plain C++.
#pragma once
#include <dlfcn.h>

namespace liger::gpu {

// Returns the function `name` that the library of the symbol `neighbour` calls: from that library, or from a library that it was linked to.
// Returns nullptr if there is none. If `neighbour` is nullptr, searches in dlsym's default order (RTLD_DEFAULT). That search may find the
// wrong function: a process may have loaded several major versions of a library, and any of them may come first.
inline void* find_symbol(const void* neighbour, const char* name) {
  if (neighbour == nullptr) return dlsym(RTLD_DEFAULT, name);
  Dl_info place;
  void* const library = dladdr(neighbour, &place) != 0 ? dlopen(place.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
  if (library == nullptr) return nullptr;
  void* const found = dlsym(library, name);
  dlclose(library);  // the library of `neighbour` stays loaded
  return found;
}

}  // namespace liger::gpu
