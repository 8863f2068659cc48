// Lists the launches of an op's call without running it, for any GPU, also one that the machine lacks. Python reads the list by _C.plans:
// the doctor (python -m liger_ext doctor) prints it, and tests check that the launches are legal and together cover all of the work.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "launch/launch.h"

namespace liger::launch {

// A property of a call on which an op's launches depend, in addition to the fields of Call: a number, or 0 or 1. Each fact is a constant
// beside the Planned of its op, or in a header if several ops use it.
struct Fact {
  explicit Fact(const char* name, int64_t default_value = 0);
  Fact(const Fact&) = delete;

  const char* const name;
  const int64_t default_value;  // the default, for a call that does not set the fact
};
inline const Fact bias{"bias"};
inline const Fact frozen{"frozen"};  // backward: no parameter needs a gradient, and the weight has x's dtype

// The properties of an op's call on which its launches depend.
struct Call {
  int64_t rows = 1, cols = 1;  // of x, gate, logits; rope: positions and head_dim; fused loss: tokens and vocabulary
  int element_bytes = 2;
  bool aligned = true;  // 16-byte accesses fit all rows
  bool contiguous = true;  // no gaps between rows
  Knobs knobs;  // for the launches that take knobs
  std::map<std::string, int64_t, std::less<>> facts;  // by their names

  int64_t operator[](const Fact& fact) const {
    const auto found = facts.find(fact.name);
    return found == facts.end() ? fact.default_value : found->second;
  }
};

inline int wide_vec(const Call& call) { return 16 / call.element_bytes; }
// Elements per access for a kernel that uses vectors only if rows are aligned and consist of whole vectors.
inline int row_vec(const Call& call) { return call.aligned && call.cols % wide_vec(call) == 0 ? wide_vec(call) : 1; }
inline bool empty(const Call& call) { return call.rows == 0 || call.cols == 0; }

using Launches = std::vector<Launch>;

// Registers an op, or an op's backward, for the functions below: the function that returns its launches, and all kernels that it may
// launch. Each is a constant in a .cpp file of csrc/launch; those of the fused loss are in trace/fused_loss_plans.cpp.
struct Planned {
  Planned(const char* op, Launches (*launches)(const DeviceProfile&, const Call&), std::vector<const Kernel*> kernels);
  Planned(const Planned&) = delete;

  const std::string op;
  Launches (*const launches)(const DeviceProfile&, const Call&);
  const std::vector<const Kernel*> kernels;
};

// Returns the launches of an op, in order, without matmuls, which cuBLAS or hipBLAS launches. The chunks of a fused loss between the first
// and the last are equal and are listed once. Throws std::invalid_argument for an unknown op or fact, with a list of the known ones.
Launches plans(std::string_view op, const DeviceProfile&, const Call&);
std::vector<std::string> planned_ops();
// All kernels, with their instances.
std::vector<const Kernel*> kernels();

}  // namespace liger::launch
