#include "gpu/host/simt.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "gpu/host/fibres.h"
#include "gpu/host/kernels.h"
#include "gpu/host/memory.h"
#include "gpu/host/transfers.h"
#include "kernels/errors.h"

namespace liger::gpu::simt {
namespace {

enum class Stop { none, returned, block_barrier, group_barrier, warp_barrier, shuffle, phase, cluster_barrier };
constexpr int max_groups = 15;  // CUDA's 16 barriers of a block, without the block's own

struct Thread {
  Stop stop = Stop::none;
  std::source_location where;
  uint32_t bits = 0;    // of a shuffle
  int mask = 0;
  int group = 0, group_threads = 0;  // of a group barrier
  const uint64_t* mbarrier = nullptr;  // of a wait for a phase
  int parity = 0;
  int arrivals = 0, waits = 0;  // at the cluster barrier
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
    case Stop::phase:
      return "waits for an mbarrier at " + site(t.where);
    case Stop::cluster_barrier:
      return "waits at the cluster barrier of " + site(t.where);
    default:
      return "waits at the shuffle of " + site(t.where);
  }
}

// The scheduler. It runs one launch at a time. A thread is a fibre, which waits for its next collective or for its next kernel.
class Machine {
 public:
  Place place{};
  std::string launched;  // a line for each launch

  void run(const Kernel& kernel, const launch::Launch& config) {
    const std::lock_guard lock(mutex_);
    const launch::LaunchPlan& plan = config.plan;
    kernel_ = &kernel;
    warp_ = warp_width();
    check(plan);
    RegisteredKernel& registered = registered_kernels()[kernel.index];
    ++registered.launches;
    launched += text(plan.grid, " ", plan.block, " ", plan.smem, " ", registered.name, "\n");
    fibres_.allocate_stacks();
    memory::begin_launch(registered.name, kernel.args, kernel.args_bytes, fibres_.stacks(), Fibres::stacks_bytes(), warp_, plan.smem);
    struct End {
      ~End() { memory::end_launch(); }
    } end;
    block_threads_ = plan.block;
    blocks_ = plan.cluster;
    for (first_block_ = 0; first_block_ < plan.grid; first_block_ += blocks_) run_blocks();
    memory::check_launch(config.rows, config.cols);
  }

  // Called by the running thread: returns to the scheduler until the thread is resumed.
  void suspend(Stop stop, const std::source_location& where) {
    Thread& t = running();
    t.stop = stop;
    t.where = where;
    fibres_.suspend(running_id());
  }
  void group_barrier(int group, int threads, const std::source_location& where) {
    running().group = group;
    running().group_threads = threads;
    suspend(Stop::group_barrier, where);
  }
  uint32_t shuffle(uint32_t bits, int mask, const std::source_location& where) {
    Thread& t = running();
    t.bits = bits;
    t.mask = mask;
    suspend(Stop::shuffle, where);
    return t.bits;
  }
  void wait_for_phase(const uint64_t* mbarrier, int parity, const std::source_location& where) {
    running().mbarrier = mbarrier;
    running().parity = parity;
    suspend(Stop::phase, where);
  }
  void cluster_arrive() { ++running().arrivals; }

  [[noreturn]] void report(const void* code, const std::string& finding) {
    finding_ = described(finding);
    finding_code_ = code;
    fibres_.abandon(running_id());
  }

 private:
  int running_id() const { return place.rank * most_threads + place.thread; }
  Thread& running() { return threads_[running_id()]; }
  // Sets the running thread, which findings are about. Ids run through the blocks of a cluster (gpu/host/cells.h).
  void set_running(int id) {
    const int rank = id / most_threads;
    place = {id % most_threads, block_threads_, rank, blocks_, first_block_ + rank, kernel_grid_};
    memory::begin_thread(id);
  }
  std::string described(const std::string& finding) const {
    return text("host target: ", finding, "\n  kernel ", registered_kernels()[kernel_->index].name, "\n  block ", place.block, " of ",
                place.grid, ", thread ", place.thread, " of ", place.block_threads, " (warp ", place.thread / warp_, ", lane ",
                place.thread % warp_, ")\n  after ",
                since_.line() == 0 ? "the start of the block" : "the block barrier of " + site(since_));
  }
  // Throws a finding of the scheduler itself, about thread `id`.
  [[noreturn]] void fail(int id, const std::string& finding) {
    set_running(id);
    throw_finding(described(finding));
  }
  // Abandons the threads in the middle of a kernel: their fibres start anew.
  [[noreturn]] void throw_finding(const std::string& finding) {
    memory::begin_thread(-1);
    for (int id = 0; id < max_threads; ++id)
      if (threads_[id].stop != Stop::returned) fibres_.start_anew(id);
    throw std::runtime_error(finding);
  }

  void check(const launch::LaunchPlan& plan) {
    since_ = {};
    block_threads_ = plan.block, blocks_ = 1, first_block_ = 0, kernel_grid_ = plan.grid;
    if (plan.block < 1 || plan.block > kernel_->max_threads || plan.block > most_threads)
      fail(0, text("launched with ", plan.block, " threads, compiled for at most ", kernel_->max_threads));
    if (plan.block % warp_ != 0) fail(0, text("launched with ", plan.block, " threads, which is no multiple of the warp's ", warp_));
    if (plan.smem > profile().shared_per_block_optin)
      fail(0, text("launched with ", plan.smem, " bytes of shared memory; the device has ", profile().shared_per_block_optin));
    bool has_clusters = plan.cluster == 1;
    for (int i = 1; i < 4; ++i) has_clusters |= plan.cluster == 1 << i && profile().resident_clusters[0][i] > 0;
    if (plan.grid < 1 || !has_clusters || plan.grid % plan.cluster != 0)
      fail(0, text("launched with ", plan.grid, " blocks in clusters of ", plan.cluster));
  }

  // Calls f(first thread of the warp) for each warp of the running blocks, or of one of them.
  template <class F> void each_warp(const F& f) {
    for (int rank = 0; rank < blocks_; ++rank) each_warp(rank, f);
  }
  template <class F> void each_warp(int rank, const F& f) {
    for (int first = 0; first < block_threads_; first += warp_) f(rank * most_threads + first);
  }
  bool all_at(Stop stop, int first, int count) const {
    for (int t = first; t < first + count; ++t)
      if (threads_[t].stop != stop) return false;
    return true;
  }
  void resume_threads(int first, int count) {
    for (int t = first; t < first + count; ++t) threads_[t].stop = Stop::none;
  }

  void run_blocks() {
    since_ = {};
    memory::begin_blocks();
    transfers::begin_blocks(blocks_);
    each_warp([&](int first) {
      resume_threads(first, warp_);
      for (int t = first; t < first + warp_; ++t) threads_[t].arrivals = threads_[t].waits = 0;
    });
    bool ended[most_blocks] = {};
    for (;;) {
      each_warp([&](int first) {
        if (threads_[first].stop == Stop::none) run_warp(first);
      });
      int returned = 0;
      for (int rank = 0; rank < blocks_; ++rank) {
        const int first = rank * most_threads;
        if (!all_at(Stop::returned, first, block_threads_)) continue;
        ++returned;
        if (std::exchange(ended[rank], true)) continue;
        set_running(first);
        if (const std::string finding = transfers::unfinished(rank); !finding.empty()) fail(first, finding);
        memory::begin_thread(-1);
      }
      if (returned == blocks_) return;
      bool any = release_groups();
      any |= release_blocks();
      any |= release_phases();
      any |= release_cluster();
      if (!any) fail_stuck();
    }
  }

  // Each release function resumes the threads whose wait is over, and returns whether there were any.
  bool release_blocks() {
    bool any = false;
    for (int rank = 0; rank < blocks_; ++rank) {
      const int first = rank * most_threads, first_warp = first / warp_, end_warp = (first + block_threads_) / warp_;
      if (!all_at(Stop::block_barrier, first, block_threads_)) continue;
      require_convergence(first, block_threads_);
      since_ = threads_[first].where;
      if (blocks_ == 1) memory::at_block_barrier();
      else memory::at_group_barrier(first_warp, end_warp);
      transfers::at_block_barrier(first_warp, end_warp);
      resume_threads(first, block_threads_);
      any = true;
    }
    return any;
  }
  bool release_phases() {
    bool any = false;
    each_warp([&](int first) { any |= threads_[first].stop == Stop::phase && release_phase(first); });
    return any;
  }
  bool release_phase(int first) {
    for (int t = first; t < first + warp_; ++t)
      if (!transfers::complete(threads_[t].mbarrier, threads_[t].parity)) return false;
    for (int t = first; t < first + warp_; ++t) transfers::waited(threads_[t].mbarrier, first / warp_);
    resume_threads(first, warp_);
    return true;
  }
  bool release_cluster() {
    int over = most_threads;  // the number of barriers at which all threads of the cluster have arrived
    each_warp([&](int first) {
      for (int t = first; t < first + warp_; ++t) over = std::min(over, threads_[t].arrivals);
    });
    bool any = false;
    each_warp([&](int first) {
      if (threads_[first].stop != Stop::cluster_barrier || threads_[first].waits >= over) return;
      for (int t = first; t < first + warp_; ++t) ++threads_[t].waits;
      resume_threads(first, warp_);
      any = true;
    });
    if (any) transfers::at_cluster_barrier(over);
    return any;
  }
  // No thread can continue.
  [[noreturn]] void fail_stuck() {
    each_warp([&](int first) {
      if (threads_[first].stop != Stop::phase) return;
      set_running(first);
      fail(first, text("deadlock: this thread ", transfers::waiting_for(threads_[first].mbarrier), ", at ", site(threads_[first].where)));
    });
    for (int rank = 0; rank < blocks_; ++rank) {
      const int first = rank * most_threads;
      require_convergence(first, block_threads_);
      if (threads_[first].stop == Stop::group_barrier)
        fail(first, text("divergence: this thread ", stop_text(threads_[first]), ", and so do parts of other groups"));
      if (threads_[first].stop == Stop::cluster_barrier)
        fail(first, text("deadlock: this thread ", stop_text(threads_[first]), ", where not all of the cluster have arrived"));
    }
    fail(0, "deadlock: no thread can go on");
  }

  bool release_groups() {
    bool any = false;
    each_warp([&](int first) {
      const Thread& t = threads_[first];
      if (t.stop != Stop::group_barrier) return;
      const int block = first - first % most_threads, begin = block + t.group * t.group_threads, end = begin + t.group_threads;
      if (t.group < 0 || t.group >= max_groups || t.group_threads % warp_ != 0 || begin > first || end <= first ||
          end > block + block_threads_)
        fail(first, text("group barrier: group ", t.group, " of ", t.group_threads, " threads, at ", site(t.where)));
      bool complete = true;
      for (int u = begin; u < end; ++u)
        complete = complete && threads_[u].stop == Stop::group_barrier && threads_[u].group == t.group &&
                   threads_[u].group_threads == t.group_threads;
      if (!complete) return;
      require_convergence(begin, end - begin);
      memory::at_group_barrier(begin / warp_, end / warp_);
      transfers::at_block_barrier(begin / warp_, end / warp_);
      resume_threads(begin, end - begin);
      any = true;
    });
    return any;
  }

  // Runs a warp until it has returned or waits for other warps.
  void run_warp(int first) {
    for (;;) {
      for (int t = first; t < first + warp_; ++t) resume(t);
      require_convergence(first, warp_);
      transfers::at_collective(first / warp_);
      const Stop stop = threads_[first].stop;
      if (stop == Stop::phase) {
        if (!release_phase(first)) return;
        continue;
      }
      if (stop == Stop::shuffle) exchange(first);
      else if (stop == Stop::warp_barrier) memory::at_warp_barrier(first / warp_);
      else return;
      resume_threads(first, warp_);
    }
  }

  // Fails unless all `count` threads have stopped at the same place.
  void require_convergence(int first, int count) {
    const Thread& a = threads_[first];
    for (int t = first + 1; t < first + count; ++t) {
      const Thread& b = threads_[t];
      const char *const file = a.where.file_name(), *const other = b.where.file_name();
      const bool same = a.stop == b.stop && (a.stop == Stop::returned ||
                                             (a.where.line() == b.where.line() && (file == other || std::strcmp(file, other) == 0)));
      if (!same) fail(t, text("divergence: this thread ", stop_text(b), ", thread ", first % most_threads, " ", stop_text(a)));
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
  void resume(int id) {
    set_running(id);
    fibres_.resume(id);
    memory::begin_thread(-1);
    if (!finding_.empty()) {
      const std::string finding = finding_ + source_lines(finding_code_);
      finding_.clear();
      throw_finding(finding);
    }
  }
  static void run_kernels();  // the body of a fibre

  std::mutex mutex_;
  const Kernel* kernel_ = nullptr;
  int warp_ = 32, block_threads_ = 0, blocks_ = 1;  // blocks_: of a cluster; they run together
  int64_t first_block_ = 0, kernel_grid_ = 1;
  Thread threads_[max_threads];
  Fibres fibres_{run_kernels};
  std::source_location since_;
  std::string finding_;
  const void* finding_code_ = nullptr;
};

Machine machine;

void Machine::run_kernels() {
  for (;;) {
    machine.kernel_->run(machine.kernel_->args);
    machine.suspend(Stop::returned, {});
  }
}

}  // namespace

Place place() { return machine.place; }
unsigned char* shared_memory() { return memory::shared(); }
void report(const void* code, const std::string& finding) { machine.report(code, finding); }
void run(const Kernel& kernel, const launch::Launch& config) { machine.run(kernel, config); }

void block_barrier(const std::source_location& where) { machine.suspend(Stop::block_barrier, where); }
void group_barrier(int group, int threads, const std::source_location& where) { machine.group_barrier(group, threads, where); }
void warp_barrier(const std::source_location& where) { machine.suspend(Stop::warp_barrier, where); }
uint32_t shuffle_xor(uint32_t bits, int mask, const std::source_location& where) { return machine.shuffle(bits, mask, where); }

void cluster_arrive() { machine.cluster_arrive(); }
void cluster_wait(const std::source_location& where) { machine.suspend(Stop::cluster_barrier, where); }
void wait_for_phase(uint64_t* mbarrier, int parity, const std::source_location& where) {
  transfers::check(mbarrier, __builtin_return_address(0));
  machine.wait_for_phase(mbarrier, parity, where);
}

int atomic_claim(int* flag) {
  const int before = *flag;
  if (before == 0) *flag = 1;
  return before;
}

}  // namespace liger::gpu::simt

// Returns a line for each launch since its last call: blocks, threads of a block, bytes of shared memory, and the kernel's name.
extern "C" [[gnu::visibility("default")]] const char* liger_ext_host_launched() {
  static std::string lines;
  lines = std::exchange(liger::gpu::simt::machine.launched, {});
  return lines.c_str();
}
