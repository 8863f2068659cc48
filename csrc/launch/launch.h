// Launch: one launch of a kernel, as plain data. Each launch/<op>.h declares functions that return the launches of an op. These functions
// are their only description: csrc/gpu executes the launches that they return, and csrc/trace records them. The same header lists the op's
// kernels (Kernel), each with all instances of its template.
//
// The last argument of most of these functions points to knobs (knobs.h), which change the plans. Tuning and tests pass knobs. Ops pass
// null; then the table of tuned knobs applies. The functions throw std::length_error if a tensor needs more threads than one launch can
// have on the device.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "launch/plan.h"

namespace liger::launch {

// Launch bounds (the most threads of a block) of several kernels.
constexpr int row_threads = 1024;  // kernels whose threads process a row together: they hold it in registers, or loop over it
constexpr int independent_threads = 256;  // kernels whose threads are independent of each other

// Bytes of dynamic shared memory for reductions of `values` floats at a time over the threads of a row (RowGroup in gpu/rows.h): two
// mbarriers of 8 bytes, which count the messages of a cluster's blocks, and two buffers of `values` floats for each of up to 32 warps per
// block.
constexpr int reduction_bytes(int values, int cluster = 1) { return 2 * 8 + 2 * values * 32 * cluster * int(sizeof(float)); }

// In the fused loss, rows of at least this many vectors mostly get a cluster of two or more blocks of 256 threads. A block of 512 threads
// with eight vectors each would hold rows of up to 4,096 vectors, but is slower.
constexpr int cluster_min_vectors = 512 * 8 / 4 * 3;

// How threads share a row, as a template argument: one of these, or the number of threads of a row, if it is a compile-time constant.
enum RowLayout : int {
  any_threads,  // the plan sets the number
  whole_warps,  // the plan sets the number of whole warps
  overlapped_rows,  // 512 threads, which add up the next row before they store the last one
};

// A kernel instance: its launch bound, and the integer arguments of its template. These are vec, k and the row layout, in this order;
// `none` marks an argument that the template does not have.
constexpr int none = -1, wide = -2;
struct Instance {
  int max_threads = 0;  // launch bound, from which the compiler derives how many registers a thread may have
  int vec = none;  // elements per access. `wide` is 16 bytes: the table then holds two instances, one of 4 elements and one of 8
  int k = none;  // vectors per thread
  int row_layout = none;  // a RowLayout, or a number of threads; NormBackwardFew: the lanes that share a row of a tile of columns
  bool ahead = false;  // true: compiled only where devices may have clusters (may_have_clusters in csrc/gpu), so not for HIP
  bool operator==(const Instance&) const = default;
};
constexpr bool any_instance(const Instance&) { return true; }

struct Kernel {
  const char* name;  // of its struct in csrc/gpu
  Instance instances[20];  // all of them; unused entries have max_threads 0

  template <class... All> constexpr explicit Kernel(const char* name, All... all) : name(name) {
    int count = 0;
    for (const Instance& entry : {Instance(all)...}) {
      instances[count++] = entry;
      if (entry.vec == wide) instances[count - 1].vec = 4, instances[count] = entry, instances[count++].vec = 8;
    }
  }
  // Returns the instance that has these arguments. If there is none, throws std::logic_error; in a constant expression, this is a compile
  // error.
  constexpr const Instance& instance(int vec = none, int k = none, int row_layout = none) const {
    for (const Instance& entry : instances)
      if (entry.max_threads > 0 && entry.vec == vec && entry.k == k && entry.row_layout == row_layout) return entry;
    throw std::logic_error("a launch is planned for an instance that its kernel does not have");
  }
};

struct Launch {
  const Kernel* kernel = nullptr;  // null: this launch is left out
  Instance instance;
  int64_t rows = 0, cols = 0;  // size of the matrix that the kernel processes
  LaunchPlan plan;
  Tunable tunable;  // the name under which knobs for this launch are looked up; none: the launch takes no knobs

  bool is(const Kernel& other) const { return kernel == &other; }
};

// The launches of a call, in order. Up to four need no allocation.
class Launches {
 public:
  Launches() = default;
  Launches(std::initializer_list<Launch> all) {
    for (const Launch& one : all) push_back(one);
  }
  void push_back(const Launch& one) {
    if (count_ == first_.size()) all_.assign(begin(), end());
    if (count_ < first_.size()) first_[count_] = one;
    else all_.push_back(one);
    ++count_;
  }
  size_t size() const { return count_; }
  const Launch* begin() const { return all_.empty() ? first_.data() : all_.data(); }
  const Launch* end() const { return begin() + count_; }

 private:
  std::array<Launch, 4> first_;
  std::vector<Launch> all_;  // empty for up to four launches
  size_t count_ = 0;
};

// All kernels.
std::span<const Kernel* const> kernels();

// Calls f.operator()<I>() with the instance I of a launch of KernelTable. Compiles only the instances for which Fits(instance) is true, and
// throws std::logic_error if the launch needs another one.
template <const Kernel& KernelTable, auto Fits = any_instance, class F> void with_instance(const Launch& config, F f) {
  const auto run_if_it_is = [&]<size_t At>() {
    constexpr Instance entry = KernelTable.instances[At];
    if constexpr (entry.max_threads > 0 && Fits(entry))
      if (config.instance == entry) return f.template operator()<entry>(), true;
    return false;
  };
  const bool found = config.is(KernelTable) && [&]<size_t... At>(std::index_sequence<At...>) {
    return (run_if_it_is.template operator()<At>() || ...);
  }(std::make_index_sequence<std::size(KernelTable.instances)>{});
  if (!found) throw std::logic_error(std::string("a launch is planned for an instance of ") + KernelTable.name + " that has no code here");
}

}  // namespace liger::launch
