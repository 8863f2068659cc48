#include "gpu/host/simt.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "gpu/host/memory.h"
#include "kernels/errors.h"

namespace liger::gpu::simt {
namespace {

constexpr int max_threads = 1024;
// A frame of a kernel is a few KiB; the lowest page of each stack is a guard.
constexpr size_t stack_bytes = 256 << 10, page_bytes = 4096;

enum class Stop { none, returned, block_barrier, group_barrier, warp_barrier, shuffle };
constexpr int max_groups = 15;  // CUDA's barriers of a block, but for the block's own

struct Thread {
  jmp_buf resume_at;
  bool exists = false;  // as a fibre that waits, for its next collective or for its next kernel
  Stop stop = Stop::none;
  std::source_location where;
  uint32_t bits = 0;    // of a shuffle
  int mask = 0;
  int group = 0, group_threads = 0;  // of a group barrier
};

std::string site(const std::source_location& where) {
  const char* const name = std::strrchr(where.file_name(), '/');
  return text(name ? name + 1 : where.file_name(), ":", where.line());
}

std::string stop_text(const Thread& t) {
  switch (t.stop) {
    case Stop::returned:
      return "has returned";
    case Stop::block_barrier:
      return "waits at the block barrier of " + site(t.where);
    case Stop::group_barrier:
      return "waits at the group barrier of " + site(t.where);
    case Stop::warp_barrier:
      return "waits at the warp barrier of " + site(t.where);
    default:
      return "waits at the shuffle of " + site(t.where);
  }
}

struct KnownKernel {
  std::string name;
  int64_t launches = 0;
};
std::vector<KnownKernel>& known_kernels() {
  static std::vector<KnownKernel> all;
  return all;
}

// Where the instruction before `code` was written, innermost function first, by binutils where they are installed.
std::string source_of(const void* code) {
  Dl_info image;
  if (code == nullptr || dladdr(code, &image) == 0) return "";
  char offset[32];
  std::snprintf(offset, sizeof(offset), "%tx", static_cast<const char*>(code) - static_cast<const char*>(image.dli_fbase) - 1);
  std::string lines;
  if (FILE* const pipe = popen(text("addr2line -ise '", image.dli_fname, "' ", offset, " 2>/dev/null").c_str(), "r")) {
    char line[4096];
    while (std::fgets(line, sizeof(line), pipe))
      lines += text(lines.empty() ? "\n  at " : ", in ", std::string(line, std::strcspn(line, " \n")));
    pclose(pipe);
  }
  return lines;
}

// One launch at a time; a fibre is resumed and suspended by longjmp, ucontext only starts it.
class Machine {
 public:
  Place place{};
  std::string launched;  // a line for each launch

  void run(const Kernel& kernel, const launch::Launch& made) {
    const std::lock_guard lock(mutex_);
    const launch::LaunchPlan& plan = made.plan;
    kernel_ = &kernel;
    warp_ = warp_width();
    check(plan);
    KnownKernel& known = known_kernels()[kernel.known];
    ++known.launches;
    launched += text(plan.grid, " ", plan.block, " ", plan.smem, " ", known.name, "\n");
    make_stacks();
    memory::begin_launch(known.name, kernel.args, kernel.args_bytes, stacks_, stack_bytes * max_threads, warp_, plan.smem);
    struct End {
      ~End() { memory::end_launch(); }
    } end;
    place = {0, plan.block, 0, plan.grid};
    for (place.block = 0; place.block < plan.grid; ++place.block) run_block();
    memory::check_launch(made.rows, made.cols);
  }

  // Called by the running thread: back to the scheduler, until it is resumed.
  void suspend(Stop stop, const std::source_location& where) {
    Thread& t = threads_[place.thread];
    t.stop = stop;
    t.where = where;
    if (!_setjmp(t.resume_at)) _longjmp(scheduler_, 1);
  }
  void group_barrier(int group, int threads, const std::source_location& where) {
    threads_[place.thread].group = group;
    threads_[place.thread].group_threads = threads;
    suspend(Stop::group_barrier, where);
  }
  uint32_t shuffle(uint32_t bits, int mask, const std::source_location& where) {
    const int thread = place.thread;
    threads_[thread].bits = bits;
    threads_[thread].mask = mask;
    suspend(Stop::shuffle, where);
    return threads_[thread].bits;
  }

  [[noreturn]] void report(const void* code, const std::string& finding) {
    finding_ = described(finding);
    finding_code_ = code;
    threads_[place.thread].exists = false;
    _longjmp(scheduler_, 1);
  }

 private:
  std::string described(const std::string& finding) const {
    return text("host target: ", finding, "\n  kernel ", known_kernels()[kernel_->known].name, "\n  block ", place.block, " of ",
                place.grid, ", thread ", place.thread, " of ", place.block_threads, " (warp ", place.thread / warp_, ", lane ",
                place.thread % warp_, ")\n  after ",
                since_.line() == 0 ? "the start of the block" : "the block barrier of " + site(since_));
  }
  // The scheduler's own findings are about `thread`.
  [[noreturn]] void fail(int thread, const std::string& finding) {
    place.thread = thread;
    throw_finding(described(finding));
  }
  // Threads in the middle of a kernel are given up: their fibres start anew.
  [[noreturn]] void throw_finding(const std::string& finding) {
    for (Thread& t : threads_) t.exists = t.exists && t.stop == Stop::returned;
    throw std::runtime_error(finding);
  }

  void check(const launch::LaunchPlan& plan) {
    since_ = {};
    place = {0, plan.block, 0, plan.grid};
    if (plan.block < 1 || plan.block > kernel_->max_threads || plan.block > max_threads)
      fail(0, text("launched with ", plan.block, " threads, compiled for at most ", kernel_->max_threads));
    if (plan.block % warp_ != 0) fail(0, text("launched with ", plan.block, " threads, which is no multiple of the warp's ", warp_));
    if (plan.smem > profile().shared_per_block_optin)
      fail(0, text("launched with ", plan.smem, " bytes of shared memory; the device has ", profile().shared_per_block_optin));
    if (plan.grid < 1 || plan.cluster != 1) fail(0, text("launched with ", plan.grid, " blocks in clusters of ", plan.cluster));
  }

  void make_stacks() {
    if (stacks_ != nullptr) return;
    void* const made = mmap(nullptr, stack_bytes * max_threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    stacks_ = static_cast<unsigned char*>(made);
    for (int t = 0; t < max_threads; ++t) mprotect(stacks_ + t * stack_bytes, page_bytes, PROT_NONE);
  }

  void run_block() {
    since_ = {};
    memory::begin_block();
    for (int t = 0; t < place.block_threads; ++t) threads_[t].stop = Stop::none;
    for (;;) {
      for (int first = 0; first < place.block_threads; first += warp_)
        if (threads_[first].stop == Stop::none) run_warp(first);
      if (release_groups()) continue;
      agree(0, place.block_threads);
      if (threads_[0].stop == Stop::returned) return;
      if (threads_[0].stop == Stop::group_barrier)
        fail(0, text("divergence: this thread ", stop_text(threads_[0]), ", and so do parts of other groups"));
      since_ = threads_[0].where;
      memory::at_block_barrier();
      for (int t = 0; t < place.block_threads; ++t) threads_[t].stop = Stop::none;
    }
  }

  // Groups whose threads are all at their barrier go on; are there any?
  bool release_groups() {
    bool any = false;
    for (int first = 0; first < place.block_threads; first += warp_) {
      const Thread& t = threads_[first];
      if (t.stop != Stop::group_barrier) continue;
      const int begin = t.group * t.group_threads, end = begin + t.group_threads;
      if (t.group < 0 || t.group >= max_groups || t.group_threads % warp_ != 0 || begin > first || end <= first ||
          end > place.block_threads)
        fail(first, text("group barrier: group ", t.group, " of ", t.group_threads, " threads, at ", site(t.where)));
      bool complete = true;
      for (int u = begin; u < end; ++u)
        complete = complete && threads_[u].stop == Stop::group_barrier && threads_[u].group == t.group &&
                   threads_[u].group_threads == t.group_threads;
      if (!complete) continue;
      agree(begin, end - begin);
      memory::at_group_barrier(begin / warp_, end / warp_);
      for (int u = begin; u < end; ++u) threads_[u].stop = Stop::none;
      any = true;
    }
    return any;
  }

  // Until the warp has returned or waits for the others.
  void run_warp(int first) {
    for (;;) {
      for (int t = first; t < first + warp_; ++t) resume(t);
      agree(first, warp_);
      const Stop stop = threads_[first].stop;
      if (stop == Stop::returned || stop == Stop::block_barrier || stop == Stop::group_barrier) return;
      if (stop == Stop::shuffle) exchange(first);
      else memory::at_warp_barrier(first / warp_);
      for (int t = first; t < first + warp_; ++t) threads_[t].stop = Stop::none;
    }
  }

  // All of `count` threads have stopped at the same place.
  void agree(int first, int count) {
    const Thread& a = threads_[first];
    for (int t = first + 1; t < first + count; ++t) {
      const Thread& b = threads_[t];
      const bool same =
          a.stop == b.stop &&
          (a.stop == Stop::returned || (a.where.line() == b.where.line() && std::strcmp(a.where.file_name(), b.where.file_name()) == 0));
      if (!same) fail(t, text("divergence: this thread ", stop_text(b), ", thread ", first, " ", stop_text(a)));
    }
  }

  void exchange(int first) {
    uint32_t bits[64];
    for (int lane = 0; lane < warp_; ++lane) {
      const Thread& t = threads_[first + lane];
      const int partner = lane ^ t.mask;
      if (t.mask < 0 || partner >= warp_)
        fail(first + lane,
             text("shuffle out of range: lane ", lane, " ^ ", t.mask, " is no lane of a warp of ", warp_, ", at ", site(t.where)));
      bits[lane] = threads_[first + partner].bits;
    }
    for (int lane = 0; lane < warp_; ++lane) threads_[first + lane].bits = bits[lane];
  }

  // Runs a thread until it stops.
  void resume(int thread) {
    place.thread = thread;
    memory::begin_thread(thread);
    if (!_setjmp(scheduler_)) {
      Thread& t = threads_[thread];
      if (t.exists) _longjmp(t.resume_at, 1);
      t.exists = true;
      ucontext_t context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_ + thread * stack_bytes;
      context.uc_stack.ss_size = stack_bytes;
      makecontext(&context, &Machine::fibre, 0);
      setcontext(&context);
    }
    memory::begin_thread(-1);
    if (!finding_.empty()) {
      const std::string finding = finding_ + source_of(finding_code_);
      finding_.clear();
      throw_finding(finding);
    }
  }
  // A fibre outlives its kernel: the next one that has this thread runs on it.
  static void fibre();

  std::mutex mutex_;
  const Kernel* kernel_ = nullptr;
  int warp_ = 32;
  Thread threads_[max_threads];
  unsigned char* stacks_ = nullptr;
  jmp_buf scheduler_;
  std::source_location since_;
  std::string finding_;
  const void* finding_code_ = nullptr;
};

Machine machine;

void Machine::fibre() {
  for (;;) {
    machine.kernel_->run(machine.kernel_->args);
    machine.suspend(Stop::returned, {});
  }
}

}  // namespace

Place place() { return machine.place; }
unsigned char* shared_memory() { return memory::shared(); }
void report(const void* code, const std::string& finding) { machine.report(code, finding); }
int know(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  known_kernels().push_back({readable ? readable.get() : name});
  return int(known_kernels().size()) - 1;
}
void run(const Kernel& kernel, const launch::Launch& made) { machine.run(kernel, made); }

void block_barrier(const std::source_location& where) { machine.suspend(Stop::block_barrier, where); }
void group_barrier(int group, int threads, const std::source_location& where) { machine.group_barrier(group, threads, where); }
void warp_barrier(const std::source_location& where) { machine.suspend(Stop::warp_barrier, where); }
uint32_t shuffle_xor(uint32_t bits, int mask, const std::source_location& where) { return machine.shuffle(bits, mask, where); }

int atomic_claim(int* flag) {
  const int before = *flag;
  if (before == 0) *flag = 1;
  return before;
}

namespace {

// A setting in the environment, one of two numbers; by default the first.
int setting(const char* name, int first, int second) {
  const char* const value = std::getenv(name);
  const std::string wanted = value ? value : std::to_string(first);
  require(wanted == std::to_string(first) || wanted == std::to_string(second), name, " is ", wanted, ", expected ", first, " or ", second);
  return std::stoi(wanted);
}

}  // namespace

int warp_width() {
  static const int width = setting("LIGER_EXT_HOST_WARP", 32, 64);
  return width;
}

// Few multiprocessors and a small L2, so that small tensors take the paths of large ones: several rows to a persistent block,
// logits that are read again. Shared memory as on most GPUs of that warp width, or as on MI355X.
launch::DeviceProfile profile() {
  launch::DeviceProfile device;
  std::strcpy(device.name, "host target");
  device.vendor = launch::Vendor::host;
  device.warp = warp_width();
  device.multiprocessors = 4;
  device.shared_per_block_optin = device.shared_per_multiprocessor = setting("LIGER_EXT_HOST_SHARED", 64, 160) << 10;
  device.l2_bytes = 64 << 10;
  device.memory_bytes = int64_t{1} << 30;
  return device;
}

}  // namespace liger::gpu::simt

// A line for each launch since the last call of this: blocks, threads of a block, bytes of shared memory, and the kernel's name.
extern "C" [[gnu::visibility("default")]] const char* liger_ext_host_launched() {
  static std::string lines;
  lines = std::exchange(liger::gpu::simt::machine.launched, {});
  return lines.c_str();
}
// A line for each kernel: how often it was launched, and its name.
extern "C" [[gnu::visibility("default")]] const char* liger_ext_host_kernels() {
  static std::string lines;
  lines.clear();
  for (const auto& kernel : liger::gpu::simt::known_kernels()) lines += liger::text(kernel.launches, " ", kernel.name, "\n");
  return lines.c_str();
}
