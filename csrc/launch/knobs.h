// Knobs: what a measurement on a device may change of the plans made for it, and the table of what has been found there.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "launch/profile.h"

namespace liger::launch {

// 0: the planner's own choice. A planner takes those that mean something to its kernel, as powers of two where it needs them, and as far
// as they are legal: a plan made with any knobs can be launched, covers all of the work, and needs no more workspace than without.
struct Knobs {
  int threads = 0;   // that share a row: the norms, softmax, rows of logits
  int block = 0;     // threads of a block, where it has several rows, or pieces
  int cluster = 0;   // blocks that share a row, at least
  int stages = 0;    // rows of a ring of copies
  int resident = 0;  // blocks that a multiprocessor has at a time, where they are persistent
  auto operator<=>(const Knobs&) const = default;
};

// The kernels that have knobs, by the names of their ops; rope's and the gated linear units' are the same in both directions, or for all
// kinds of gelu. cross_entropy_in_place: the fused loss's.
enum class Tunable : int32_t {
  none,
  every,  // of an entry: for what has none of its own (tests force plans so)
  rms_norm,
  rms_norm_backward,
  add_rms_norm,
  add_rms_norm_backward,
  layer_norm,
  layer_norm_backward,
  group_norm,
  group_norm_backward,
  swiglu,
  swiglu_backward,
  geglu,
  geglu_backward,
  relu_squared,
  relu_squared_backward,
  jsd,
  jsd_backward,
  rope,
  softmax,
  softmax_backward,
  cross_entropy,
  cross_entropy_backward,
  cross_entropy_in_place,
};

// Their names in Python, in this order.
constexpr const char* tunable_names[] = {
    "none",
    "every",
    "rms_norm",
    "rms_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "group_norm",
    "group_norm_backward",
    "swiglu",
    "swiglu_backward",
    "geglu",
    "geglu_backward",
    "relu_squared",
    "relu_squared_backward",
    "jsd",
    "jsd_backward",
    "rope",
    "softmax",
    "softmax_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_in_place",
};

static_assert(std::size(tunable_names) == size_t(Tunable::cross_entropy_in_place) + 1);

// Calls that share their knobs: rows up to the same power of two.
struct KnobKey {
  Tunable kernel = Tunable::none;
  int32_t vec = 1;             // elements of an access, in which dtype and alignment come together
  int64_t rows = 1, cols = 1;  // rope: positions and head_dim
  int32_t q_heads = 0, k_heads = 0, rotary_dim = 0;  // rope
  auto operator<=>(const KnobKey&) const = default;
};

struct KnobEntry {
  KnobKey key;
  Knobs knobs;
  char device[sizeof(DeviceProfile::name)] = "";  // a profile's name; "": any
};

// Takes the place of all entries that there were. Any thread may look up knobs meanwhile.
void set_knobs(const KnobEntry* entries, size_t count);

// Of a call on this device, whatever its number of rows; without a table one load.
Knobs knobs_of(const DeviceProfile&, const KnobKey&);
// Those that were given for the call, if any were.
inline Knobs chosen_knobs(const Knobs* given, const DeviceProfile& device, const KnobKey& call) {
  return given ? *given : knobs_of(device, call);
}

}  // namespace liger::launch
