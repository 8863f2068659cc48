// Launch: one launch of a kernel, as plain data. launch/<op>.h has a function that makes an op's launches, which is the only account of
// them: gpu/<op>.cu executes exactly what it says, plans() (op_plans.h) tells it to Python. Beside it stand the op's kernels, each with all
// of its instances. The functions' last argument: knobs for all launches of the call that take some, as tuning and tests give them; null,
// as ops do: those of the table in use (knobs.h). They throw std::length_error where a tensor needs more threads than one launch can have
// on the device.
#pragma once
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch/plan.h"

namespace liger::launch {

// Launch bounds that several kernels have.
constexpr int row_threads = 1024;  // the threads of a row hold it, or walk over it
constexpr int piece_threads = 256;  // independent pieces, nothing is exchanged

// Dynamic shared memory of reductions of `values` floats at a time over the threads of a row (RowGroup): two inboxes of 8 bytes, and two
// buffers of one float for each warp of the block, or of the cluster.
constexpr int reduction_bytes(int values, int cluster = 1) { return 2 * 8 + 2 * values * 32 * cluster * int(sizeof(float)); }

// Rows of so many vectors, which would fill 512 threads with eight each, are 1.5 % faster in two blocks of 256.
constexpr int two_blocks_from = 512 * 8 / 4 * 3;

// What a kernel's template is instantiated with. vec, k and threads are its integer arguments, in this order; `none`: it has no such
// argument.
constexpr int none = -1, wide = -2;
struct Instance {
  int max_threads = 0;  // its launch bound, from which the compiler takes how many registers a thread may have
  int vec = none;  // elements of an access; `wide`: 16 bytes, which are two instances, for 4 elements and for 8
  int k = none;  // vectors of a thread
  int threads = none;  // that are known to the compiler
  bool ahead = false;  // only where there may be clusters, or copies that fetch rows ahead
  bool operator==(const Instance&) const = default;
};
constexpr bool any_instance(const Instance&) { return true; }

struct Kernel {
  const char* name;  // its struct's in csrc/gpu
  Instance instances[16];  // all there are

  template <class... All> constexpr explicit Kernel(const char* name, All... all) : name(name) {
    int count = 0;
    for (const Instance& of : {Instance(all)...}) {
      instances[count++] = of;
      if (of.vec == wide) instances[count - 1].vec = 4, instances[count] = of, instances[count++].vec = 8;
    }
  }
  // The one of these arguments; std::logic_error, in a constant expression a compiler's error, if there is none.
  constexpr const Instance& instance(int vec = none, int k = none, int threads = none) const {
    for (const Instance& of : instances)
      if (of.max_threads > 0 && of.vec == vec && of.k == k && of.threads == threads) return of;
    throw std::logic_error("a launch is planned for an instance that its kernel does not have");
  }
};

struct Launch {
  const Kernel* kernel = nullptr;  // null: there is no such launch
  Instance instance;
  int64_t rows = 0, cols = 0;  // what it works on
  LaunchPlan plan;
  Tunable tunable;  // whose knobs it takes

  bool of(const Kernel& other) const { return kernel == &other; }
};

// Calls f.operator()<I>() with the instance I of a launch, which is one of kernel Of that Fits. Others are not compiled; std::logic_error
// if it is one of them.
template <const Kernel& Of, auto Fits = any_instance, class F> void with_instance(const Launch& made, F f) {
  const auto is = [&]<size_t At>() {
    constexpr Instance entry = Of.instances[At];
    if constexpr (entry.max_threads > 0 && Fits(entry))
      if (made.instance == entry) return f.template operator()<entry>(), true;
    return false;
  };
  const bool found = made.of(Of) && [&]<size_t... At>(std::index_sequence<At...>) {
    return (is.template operator()<At>() || ...);
  }(std::make_index_sequence<std::size(Of.instances)>{});
  if (!found) throw std::logic_error(std::string("a launch is planned for an instance of ") + Of.name + " that has no code here");
}

}  // namespace liger::launch
