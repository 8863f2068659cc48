// Launch: one launch of a kernel, as plain data. Each launch/<op>.h has a function that makes the launches of an op. It is the only
// description of them: gpu/<op>.cu executes what the function returns, and plans() (op_plans.h) shows it to Python. Beside the function is
// a table of the op's kernels (Kernel), each with all instances of its template.
//
// The last argument of such a function are knobs (knobs.h), which change the plans. Tuning and tests pass some; ops pass null, and then the
// table of knobs that tuning has found applies. The functions throw std::length_error if a tensor needs more threads than one launch can
// have on the device.
#pragma once
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch/plan.h"

namespace liger::launch {

// Launch bounds (the most threads of a block) that several kernels have.
constexpr int row_threads = 1024;  // kernels in which the threads of a row work together: they hold it in registers, or loop over it
constexpr int independent_threads = 256;  // kernels whose threads are independent of each other

// Bytes of dynamic shared memory for reductions of `values` floats at a time over the threads of a row (RowGroup in gpu/rows.h): two
// mbarriers of 8 bytes (counters of messages in a cluster), and two buffers of `values` floats for each of up to 32 warps per block.
constexpr int reduction_bytes(int values, int cluster = 1) { return 2 * 8 + 2 * values * 32 * cluster * int(sizeof(float)); }

// Rows of this many vectors or more are given to a cluster of two blocks of 256 threads, although a block of 512 threads with eight vectors
// each would hold them: that is 1.5 % faster.
constexpr int two_blocks_from = 512 * 8 / 4 * 3;

// What a kernel's template is instantiated with. vec, k and threads are its integer template arguments, in this order; `none` stands for an
// argument that the template does not have.
constexpr int none = -1, wide = -2;
struct Instance {
  int max_threads = 0;  // its launch bound, from which the compiler takes how many registers a thread may have
  int vec = none;  // elements per access. `wide` is 16 bytes: the table then holds two instances, one of 4 elements and one of 8
  int k = none;  // vectors per thread
  int threads = none;  // the number of threads, where the compiler is to know it
  bool ahead = false;  // true: compiled only for devices that may have clusters, or copies that fetch rows ahead of their use
  bool operator==(const Instance&) const = default;
};
constexpr bool any_instance(const Instance&) { return true; }

struct Kernel {
  const char* name;  // of its struct in csrc/gpu
  Instance instances[20];  // all of them; unused entries have max_threads 0

  template <class... All> constexpr explicit Kernel(const char* name, All... all) : name(name) {
    int count = 0;
    for (const Instance& of : {Instance(all)...}) {
      instances[count++] = of;
      if (of.vec == wide) instances[count - 1].vec = 4, instances[count] = of, instances[count++].vec = 8;
    }
  }
  // The instance that has these arguments. If there is none: std::logic_error, or, in a constant expression, an error of the compiler.
  constexpr const Instance& instance(int vec = none, int k = none, int threads = none) const {
    for (const Instance& of : instances)
      if (of.max_threads > 0 && of.vec == vec && of.k == k && of.threads == threads) return of;
    throw std::logic_error("a launch is planned for an instance that its kernel does not have");
  }
};

struct Launch {
  const Kernel* kernel = nullptr;  // null: there is no such launch
  Instance instance;
  int64_t rows = 0, cols = 0;  // the size of the matrix that it works on
  LaunchPlan plan;
  Tunable tunable;  // the name under which knobs for this launch are looked up; none: it takes no knobs

  bool is(const Kernel& other) const { return kernel == &other; }
};

// Calls f.operator()<I>() with the instance I of a launch of kernel Of. Only instances for which Fits(instance) is true are compiled;
// std::logic_error if the launch needs another one.
template <const Kernel& Of, auto Fits = any_instance, class F> void with_instance(const Launch& made, F f) {
  const auto run_if_it_is = [&]<size_t At>() {
    constexpr Instance entry = Of.instances[At];
    if constexpr (entry.max_threads > 0 && Fits(entry))
      if (made.instance == entry) return f.template operator()<entry>(), true;
    return false;
  };
  const bool found = made.is(Of) && [&]<size_t... At>(std::index_sequence<At...>) {
    return (run_if_it_is.template operator()<At>() || ...);
  }(std::make_index_sequence<std::size(Of.instances)>{});
  if (!found) throw std::logic_error(std::string("a launch is planned for an instance of ") + Of.name + " that has no code here");
}

}  // namespace liger::launch
