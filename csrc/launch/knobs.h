// Knobs: what a measurement on a device may change of the plans made for it, and the table of what has been found there.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string_view>

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

// Whose knobs a launch takes: an op, or the backward of one, by its name in op_plans.h; rope's are the same in both directions.
// `id` is of the name (FNV-1a), so that every library that reads a table of knobs has the same.
constexpr uint64_t tunable_id(std::string_view name) {
  uint64_t id = 0xcbf29ce484222325;
  for (const char c : name) id = (id ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return id;
}
struct Tunable {
  const char* name = nullptr;  // null: it takes none
  uint64_t id = 0;

  constexpr Tunable() = default;
  consteval Tunable(const char* name) : name(name), id(tunable_id(name)) {}
};
// Of an entry for all that has none of its own: tests force plans so.
inline constexpr Tunable every_tunable = "every";

// Calls that share their knobs: rows up to the same power of two.
struct KnobKey {
  uint64_t kernel = 0;         // the id of a Tunable
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
