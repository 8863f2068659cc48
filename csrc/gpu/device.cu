// Host code: reads device profiles, throws the errors of launches, and raises the error of a bad target that a kernel recorded.
#include "gpu/device.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/platform_runtime.h"
#include "kernels/bad_target.h"
#include "launch/knobs.h"

namespace liger::gpu {

const launch::DeviceProfile& device_profile(int device) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<const launch::DeviceProfile>> profiles;  // pointers, since references must outlive a resize
  const std::lock_guard lock(mutex);
  if (profiles.size() <= size_t(device)) profiles.resize(device + 1);
  auto& profile = profiles[device];
  if (!profile) profile = std::make_unique<launch::DeviceProfile>(runtime::read_profile(device));
  return *profile;
}

void throw_unsupported_dtype() {
  throw std::invalid_argument(
      "float64 tensors have no GPU kernels in liger_ext: use float32, bfloat16 or float16 "
      "(on the CPU float64 works)");
}

void throw_launch_error(int code, const char* what) {
  runtime::clear_last_error();  // otherwise the next call of another library would report it
  if (!runtime::is_missing_code(code)) throw std::runtime_error(text("liger_ext: ", what, ": ", runtime::error_text(code)));
  const launch::DeviceProfile& device = device_profile(runtime::current_device());
  throw std::runtime_error(text("liger_ext's GPU library contains no code for this GPU (", device.name, ", ", runtime::architecture(device),
                                "); built for: ", runtime::built_for(), ". Rebuild it with ", runtime::rebuild_hint(device)));
}

std::string device_failure() {
  const int code = runtime::pending_error();
  if (code == 0) return {};
  runtime::clear_last_error();
  return runtime::error_text(code);
}

namespace {

// Addresses of the record on the host and on the device. The host's is atomic: a thread may read it while another one allocates the record.
std::atomic<volatile TargetRecord*> host_record{nullptr};
TargetRecord* device_record = nullptr;

}  // namespace

TargetReport target_report(const char* op, int device) {
  static std::once_flag once;
  std::call_once(once, [] {
    void *host = nullptr, *mapped = nullptr;
    runtime::allocate_mapped(sizeof(TargetRecord), &host, &mapped);
    std::memset(host, 0, sizeof(TargetRecord));
    device_record = static_cast<TargetRecord*>(mapped);
    host_record.store(static_cast<TargetRecord*>(host), std::memory_order_release);
  });
  TargetReport report{device_record, device, ""};
  std::strncpy(report.op, op, sizeof(report.op) - 1);
  return report;
}

bool target_reported() {
  const volatile TargetRecord* record = host_record.load(std::memory_order_acquire);
  return record != nullptr && record->state == 2;
}

void raise_reported_targets() {
  if (!target_reported()) return;
  static std::mutex mutex;  // two threads must not raise the same record
  const std::lock_guard lock(mutex);
  if (!target_reported()) return;
  std::atomic_thread_fence(std::memory_order_acquire);
  volatile TargetRecord* record = host_record.load();
  char op[sizeof(record->op)];
  for (size_t i = 0; i < sizeof(op); ++i) op[i] = record->op[i];
  op[sizeof(op) - 1] = 0;
  const int64_t row = record->row, target = record->target, vocab = record->vocab;
  std::atomic_thread_fence(std::memory_order_release);
  record->state = 0;
  throw_bad_target(op, row, target, vocab, "ignore_index");
}

}  // namespace liger::gpu

// Called from Python (ctypes): fills in a DeviceProfile. Returns 0, or 1 if the caller's struct is of another build or the device cannot be
// read.
extern "C" __attribute__((visibility("default"))) int liger_ext_gpu_profile(int device, void* profile, size_t bytes) {
  if (bytes != sizeof(liger::launch::DeviceProfile)) return 1;
  try {
    std::memcpy(profile, &liger::gpu::device_profile(device), bytes);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// Called from Python (ctypes): replaces the table of knobs by `count` entries. Needs no device. Returns 0, or 1 if the entries are of
// another build.
extern "C" __attribute__((visibility("default"))) int liger_ext_gpu_set_knobs(const void* entries, size_t count, size_t entry_bytes) {
  if (entry_bytes != sizeof(liger::launch::KnobEntry)) return 1;
  liger::launch::set_knobs(static_cast<const liger::launch::KnobEntry*>(entries), count);
  return 0;
}
