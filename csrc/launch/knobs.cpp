#include "launch/knobs.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "launch/plan.h"

namespace liger::launch {
namespace {

using Table = std::vector<KnobEntry>;  // sorted by key; immutable once in use
std::atomic<const Table*> in_use{nullptr};  // null: no entries

bool by_key(const KnobEntry& a, const KnobEntry& b) { return a.key < b.key; }
KnobKey knob_class(KnobKey key) {
  key.rows = next_pow2(key.rows);
  return key;
}

}  // namespace

void set_knobs(const KnobEntry* entries, size_t count) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<const Table>> retained;  // never freed: another thread may still read an old table
  auto table = std::make_unique<Table>(entries, entries + count);
  for (KnobEntry& entry : *table) entry.key = knob_class(entry.key);
  std::stable_sort(table->begin(), table->end(), by_key);
  const std::lock_guard lock(mutex);
  in_use.store(count == 0 ? nullptr : table.get(), std::memory_order_release);
  if (count > 0) retained.push_back(std::move(table));
}

Knobs tuned_knobs(const DeviceProfile& device, const KnobKey& call) {
  const Table* const table = in_use.load(std::memory_order_acquire);
  if (table == nullptr) return {};
  for (const KnobKey& wanted : {knob_class(call), knob_class({every_tunable.id})}) {
    const auto [first, last] = std::equal_range(table->begin(), table->end(), KnobEntry{wanted}, by_key);
    for (auto entry = first; entry != last; ++entry)
      if (entry->device[0] == 0 || std::strncmp(entry->device, device.name, sizeof(entry->device)) == 0) return entry->knobs;
  }
  return {};
}

}  // namespace liger::launch
