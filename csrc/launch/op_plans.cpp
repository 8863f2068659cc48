#include "launch/op_plans.h"

#include <algorithm>
#include <functional>
#include <set>
#include <stdexcept>

namespace liger::launch {
namespace {

// Filled during static initialisation, by the constants of the types Planned and Fact.
std::vector<const Planned*>& all_planned() {
  static std::vector<const Planned*> all;
  return all;
}
std::set<std::string, std::less<>>& all_facts() {
  static std::set<std::string, std::less<>> all;
  return all;
}

std::string listed(const auto& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

Fact::Fact(const char* name, int64_t default_value) : name(name), default_value(default_value) { all_facts().insert(name); }

Planned::Planned(const char* op, Launches (*launches)(const DeviceProfile&, const Call&), std::vector<const Kernel*> kernels)
    : op(op), launches(launches), kernels(std::move(kernels)) {
  std::vector<const Planned*>& all = all_planned();
  all.insert(std::ranges::lower_bound(all, this->op, {}, &Planned::op), this);
}

Launches plans(std::string_view op, const DeviceProfile& device, const Call& call) {
  for (const auto& [name, value] : call.facts)
    if (!all_facts().contains(name))
      throw std::invalid_argument("no op's launches depend on '" + name + "'; known: " + listed(all_facts()));
  for (const Planned* planned : all_planned())
    if (planned->op == op) return planned->launches(device, call);
  throw std::invalid_argument("no op is called '" + std::string(op) + "'; known: " + listed(planned_ops()));
}

std::vector<std::string> planned_ops() {
  std::vector<std::string> names;
  for (const Planned* planned : all_planned()) names.push_back(planned->op);
  return names;
}

std::vector<const Kernel*> kernels() {
  std::vector<const Kernel*> all;
  for (const Planned* planned : all_planned())
    for (const Kernel* kernel : planned->kernels)
      if (std::ranges::find(all, kernel) == all.end()) all.push_back(kernel);
  return all;
}

}  // namespace liger::launch
