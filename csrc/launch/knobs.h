// Knobs: the few parameters of a launch plan that tuning may change, and the table of the knobs that measurements on a device found better
// than the planner's choices.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "launch/profile.h"

namespace liger::launch {

// 0 leaves a choice to the planner. A planner first makes each choice independently of the knobs. Then the knob of that name, if the kernel
// uses it, replaces the choice, clamped to the legal range (with_knob(), plan.h). The other fields of a plan follow from the choices.
// So a plan with any knobs can be launched, covers all of the work, and needs no more workspace than the plan without knobs.
// The planner of the norms chooses the backward's kernel for few rows only without knobs, and the forward's instance for whole warps only
// if no knob spreads rows.
struct Knobs {
  int threads = 0;  // threads per row: the norms, softmax, rows of logits
  int block = 0;  // threads per block, where a block has several rows or independent parts; softmax: also in a cluster
  int cluster = 0;  // blocks that share a row; more if these cannot hold it
  int stages = 0;  // pipeline stages, each of which holds a row that is fetched ahead
  int resident = 0;  // blocks per multiprocessor at a time: the norms' backward, losses in place

  // Returns whether a knob sets how a row is spread over threads and blocks.
  bool spread_rows() const { return threads > 0 || block > 0 || cluster > 0; }
  // The number of blocks that should share a row. `choice` is the planner's. A knob for a row's threads alone means a single block.
  int64_t wanted_blocks(int64_t choice) const { return cluster > 0 ? cluster : threads > 0 ? 1 : choice; }
  auto operator<=>(const Knobs&) const = default;
};

// The name under which a launch looks up its knobs: that of an op, or of its backward. rope has one name for both directions.
// `id` is a hash of the name (FNV-1a), so that every library that reads a table of knobs computes the same id.
constexpr uint64_t tunable_id(std::string_view name) {
  uint64_t id = 0xcbf29ce484222325;
  for (const char c : name) id = (id ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return id;
}
struct Tunable {
  const char* name = nullptr;  // null: the launch takes no knobs
  uint64_t id = 0;

  constexpr Tunable() = default;
  consteval Tunable(const char* name) : name(name), id(tunable_id(name)) {}
};
// An entry of this name applies to every launch that takes knobs and has no entry for its own KnobKey. Tests force plans with it.
inline constexpr Tunable every_tunable = "every";

// Calls that share their knobs. Numbers of rows are rounded up to a power of two, so that similar numbers share them.
struct KnobKey {
  uint64_t kernel = 0;  // the id of a Tunable
  int32_t vec = 1;  // elements per access, which depend on dtype and alignment
  int64_t rows = 1, cols = 1;  // rope: positions and head_dim
  int32_t q_heads = 0, k_heads = 0, rotary_dim = 0;  // rope
  auto operator<=>(const KnobKey&) const = default;
};

struct KnobEntry {
  KnobKey key;
  Knobs knobs;
  char device[sizeof(DeviceProfile::name)] = "";  // a profile's name; "": any
};

// Replaces the whole table. Other threads may look up knobs meanwhile.
void set_knobs(const KnobEntry* entries, size_t count);

// Returns the table's knobs for a call on this device, and rounds the key's rows up to a power of two. Without a table it costs one load.
Knobs tuned_knobs(const DeviceProfile&, const KnobKey&);
// Returns the knobs that were passed for the call, or the table's if `passed_knobs` is null.
inline Knobs chosen_knobs(const Knobs* passed_knobs, const DeviceProfile& device, const KnobKey& call) {
  return passed_knobs ? *passed_knobs : tuned_knobs(device, call);
}

}  // namespace liger::launch
