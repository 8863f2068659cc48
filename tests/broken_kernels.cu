// Small kernels, each broken in one way that a GPU would mostly let pass; test_host_target.py asks the host target to find it.
//   broken_kernels            the names
//   broken_kernels NAME       runs the broken kernel:  prints what was found
//   broken_kernels NAME ok    runs the kernel as it should be: prints nothing
// What is broken is broken in block 1 alone, if a block can be blamed.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <typeinfo>

#include "gpu/host/memory.h"
#include "gpu/platform.h"

using namespace liger::gpu;

namespace {

constexpr int blocks = 3, threads = 128, row_floats = threads + 8;  // rows of `out` have a gap of 8 floats behind them

struct KernelArgs {
  const float* in;  // [threads]
  float* out;       // [blocks, threads]
  float* both;      // [blocks + 1], read and written
  bool ok;
  LIGER_DEVICE bool broken() const { return !ok && block_id() == 1; }
  LIGER_DEVICE float* row() const { return out + block_id() * row_floats; }
};
struct Base {
  using Args = KernelArgs;
  static constexpr int max_threads = threads;
  static constexpr bool covers = false;  // does it read all of `in` and write all of `out`?
};

LIGER_DEVICE Shared<float> zeros() {
  const Shared<float> all = shared<float>(0);
  all[thread_id()] = 0;
  block_barrier();
  return all;
}

struct MissingBarrier : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = zeros();
    all[thread_id()] = a.in[thread_id()];
    if (!a.broken()) block_barrier();
    a.row()[thread_id()] = all[(thread_id() + warp_width()) % threads];
  }
};
struct MissingDoubleBuffer : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = shared<float>(0);
    float value = a.in[thread_id()];
    for (int round = 0; round < 2; ++round) {
      const int buffer = a.broken() ? 0 : round * threads;
      all[buffer + thread_id()] = value;
      block_barrier();
      value = all[buffer + threads - 1 - thread_id()];
    }
    a.row()[thread_id()] = value;
  }
};
struct RaceInWarp : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = zeros();
    all[thread_id()] = a.in[thread_id()];
    if (!a.broken()) warp_barrier();
    a.row()[thread_id()] = all[thread_id() ^ 1];
  }
};
struct StoreAfterLoads : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = zeros();
    a.row()[thread_id()] = all[0];
    if (!a.broken()) block_barrier();
    if (thread_id() == threads - 1) all[0] = 1;
  }
};
struct StoreAfterLoadsInWarp : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = zeros();
    a.row()[thread_id()] = all[warp_id()];
    if (!a.broken()) warp_barrier();
    if (lane_id() == 11) all[warp_id()] = 1;
  }
};
struct RaceOnGlobal : Base {
  static LIGER_DEVICE void run(const Args& a) {
    a.row()[thread_id()] = a.in[thread_id()];
    if (!a.broken()) block_barrier();
    if (thread_id() == 5) a.row()[4] = 0;
  }
};
struct RaceOfBlocks : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (thread_id() == 7) (a.broken() ? a.out : a.row())[7] = 1;
  }
};
struct StoreAfterLoadsOfBlocks : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (thread_id() == 7) a.both[block_id()] = a.both[a.ok ? blocks : 1];
  }
};
struct ConditionalBarrier : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (!a.broken() || warp_id() == 0) block_barrier();
  }
};
// Two groups of threads, each with barriers of its own; the first thread's value is read by the whole group.
struct RaceOfGroups : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = shared<float>(0);
    const int group = thread_id() / 64;
    float value = a.in[thread_id()];
    for (int round = 0; round < 4; ++round) {
      const int buffer = (round & 1) * threads;
      all[buffer + thread_id()] = value;
      group_barrier(group, 64);
      value += all[buffer + (thread_id() ^ (a.broken() ? 64 : 32))] + all[buffer + group * 64];
    }
    a.row()[thread_id()] = value;
  }
};
struct MissingDoubleBufferOfGroups : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = shared<float>(0);
    const int group = thread_id() / 64;
    for (int round = 0; round < 4; ++round) {
      const int buffer = a.broken() ? 0 : (round & 1) * threads;
      if (thread_id() % 64 == 63) all[buffer + group] = 1;
      group_barrier(group, 64);
      a.row()[thread_id()] = all[buffer + group];
    }
  }
};
struct IncompleteGroup : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (!a.broken() || warp_id() == 0) group_barrier(0, threads);
  }
};
struct GroupOfPartOfAWarp : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (a.broken()) group_barrier(thread_id() / 16, 16);
  }
};
struct TwoBarriers : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (a.broken() && thread_id() == 3) block_barrier();
    else block_barrier();
  }
};
struct EarlyReturn : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (a.broken() && thread_id() == 9) return;
    a.row()[thread_id()] = shfl_xor(a.in[thread_id()], 1);
  }
};
struct ShuffleOutOfRange : Base {
  static LIGER_DEVICE void run(const Args& a) { a.row()[thread_id()] = shfl_xor(a.in[thread_id()], a.broken() ? warp_width() : 1); }
};
struct UninitialisedShared : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> all = shared<float>(0);
    if (!a.broken() || thread_id() != 2) all[thread_id()] = a.in[thread_id()];
    a.row()[thread_id()] = all[thread_id()];
  }
};
struct UninitialisedGlobal : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (!a.broken()) a.row()[thread_id()] = 0;
    if (thread_id() == 6) a.row()[6] += a.in[6];
  }
};
struct SharedOutOfBounds : Base {
  static LIGER_DEVICE void run(const Args& a) { shared<float>(0)[a.broken() && thread_id() == 1 ? 2 * threads : thread_id()] = 1; }
};
struct GlobalOutOfBounds : Base {
  static LIGER_DEVICE void run(const Args& a) { a.row()[thread_id()] = a.in[a.broken() && thread_id() == 8 ? threads : thread_id()]; }
};
struct GapBetweenRows : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (thread_id() == 4) store(a.row() + (a.broken() ? threads : 0), 1.0f);
  }
};
struct StoreToInput : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (a.broken() && thread_id() == 3) const_cast<float*>(a.in)[3] = 1;
  }
};
struct MisalignedVector : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (thread_id() == 2) store<Hint::stream>(a.row() + (a.broken() ? 2 : 4), Vec<float, 4>{});
  }
};

// Each block copies `in` to its row: found when the launch, or the op, has ended.
struct Copy : Base {
  static constexpr bool covers = true;
  static LIGER_DEVICE void run(const Args& a) { a.row()[thread_id()] = a.in[thread_id()]; }
};
struct RowLeftOut : Copy {
  static LIGER_DEVICE void run(const Args& a) {
    if (!a.broken()) Copy::run(a);
  }
};
struct TailLeftOut : Copy {
  static LIGER_DEVICE void run(const Args& a) {
    if (!a.broken() || thread_id() < threads - 4) Copy::run(a);
  }
};
struct InputLeftOut : Copy {
  static LIGER_DEVICE void run(const Args& a) { a.row()[thread_id()] = a.in[a.ok ? thread_id() : thread_id() & ~1]; }
};
struct TooFewRowsDeclared : Copy {};
struct OtherMatrixDeclared : Copy {};

// Launches that no GPU of this warp width would take.
struct TooManyThreads : Base {
  static constexpr int max_threads = 64;
  static LIGER_DEVICE void run(const Args&) {}
};
struct PartOfAWarp : Base {
  static LIGER_DEVICE void run(const Args&) {}
};
struct TooMuchSharedMemory : Base {
  static LIGER_DEVICE void run(const Args&) {}
};

template <class K> void start(bool ok) {
  constexpr int out_floats = blocks * row_floats;
  const auto in = std::make_unique<float[]>(threads);
  alignas(16) static float out[out_floats];
  float both[blocks + 1] = {};
  constexpr int64_t bytes = sizeof(float), row = row_floats * bytes;
  const auto any = [](int64_t) { return true; };
  const auto optional = K::covers ? nullptr : std::function<bool(int64_t)>(any);
  // A launch's matrix is `out` if the kernel declares too few rows of it; else its elements are known at the op's end.
  const int64_t each = std::is_same_v<K, TooFewRowsDeclared>;
  const simt::Buffers buffers{{"in", in.get(), threads * bytes, simt::Content::input, {}, bytes, 0, 0, optional},
                              {"out", out, threads * bytes, simt::Content::output, {{blocks, row}}, bytes, row, each, optional},
                              {"both", both, sizeof(both), simt::Content::both, {}, bytes, 0, 0, any}};
  liger::launch::Launch made;
  if (each) made.rows = ok ? blocks : blocks - 1, made.cols = threads;
  if (std::is_same_v<K, OtherMatrixDeclared>) made.rows = blocks, made.cols = ok ? threads : row_floats;
  liger::launch::LaunchPlan& plan = made.plan;
  plan.block = threads;
  plan.grid = blocks;
  plan.smem = 2 * threads * int(sizeof(float));
  if (std::is_same_v<K, TooManyThreads> && ok) plan.block = 64;
  if (std::is_same_v<K, PartOfAWarp> && !ok) plan.block = threads - warp_width() / 2;
  if (std::is_same_v<K, TooMuchSharedMemory> && !ok) plan.smem = simt::profile().shared_per_block_optin + 4;
  launch<K>(made, {in.get(), out, both, ok}, {});
}

// Runs the kernel if its name is asked for; prints all names if none is.
template <class K> void consider(int count, char** arguments) {
  const std::unique_ptr<char, void (*)(void*)> full(abi::__cxa_demangle(typeid(K).name(), nullptr, nullptr, nullptr), std::free);
  const char* const name = std::strrchr(full.get(), ':') + 1;
  if (count < 2) std::puts(name);
  else if (std::strcmp(arguments[1], name) == 0) try {
      start<K>(count > 2);
    } catch (const std::exception& finding) {
      std::puts(finding.what());
    }
}
template <class... All> void consider_all(int count, char** arguments) { (consider<All>(count, arguments), ...); }

}  // namespace

int main(int count, char** arguments) {
  consider_all<MissingBarrier, MissingDoubleBuffer, RaceInWarp, StoreAfterLoads, StoreAfterLoadsInWarp, StoreAfterLoadsOfBlocks,
               RaceOnGlobal, RaceOfBlocks, ConditionalBarrier, RaceOfGroups, MissingDoubleBufferOfGroups, IncompleteGroup,
               GroupOfPartOfAWarp, TwoBarriers, EarlyReturn, ShuffleOutOfRange, UninitialisedShared, UninitialisedGlobal, SharedOutOfBounds,
               GlobalOutOfBounds, GapBetweenRows, StoreToInput, MisalignedVector, RowLeftOut, TailLeftOut, InputLeftOut, TooFewRowsDeclared,
               OtherMatrixDeclared, TooManyThreads, PartOfAWarp, TooMuchSharedMemory>(count, arguments);
}
