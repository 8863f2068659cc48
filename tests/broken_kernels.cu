// Broken kernels for any GPU: see broken_kernels.h.
#include "broken_kernels.h"

namespace {

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
struct BlockRace : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (thread_id() == 7) (a.broken() ? a.out : a.row())[7] = 1;
  }
};
struct BlockStoreAfterLoads : Base {
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
struct GroupRace : Base {
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
struct MissingGroupDoubleBuffer : Base {
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
struct PartialWarpGroup : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (a.broken()) group_barrier(thread_id() / 16, 16);
  }
};
struct DifferentBarriers : Base {
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
struct ShuffleBeyondWarp : Base {
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
struct SharedPastEnd : Base {
  static LIGER_DEVICE void run(const Args& a) { shared<float>(0)[a.broken() && thread_id() == 1 ? 2 * threads : thread_id()] = 1; }
};
struct GlobalPastEnd : Base {
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

// Each block copies `in` to its row; the host target reports these when the launch, or the op, ends.
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
struct TooFewRowsDeclared : Copy {
  static constexpr bool declares_rows = true;
  static void change(liger::launch::Launch& config, bool ok) { config.rows = ok ? blocks : blocks - 1, config.cols = threads; }
};
struct OtherMatrixDeclared : Copy {
  static void change(liger::launch::Launch& config, bool ok) { config.rows = blocks, config.cols = ok ? threads : row_floats; }
};

// Launches that no GPU of this warp width accepts.
struct TooManyThreads : Base {
  static constexpr int max_threads = 64;
  static void change(liger::launch::Launch& config, bool ok) { config.plan.block = ok ? 64 : threads; }
  static LIGER_DEVICE void run(const Args&) {}
};
struct PartialWarp : Base {
  static void change(liger::launch::Launch& config, bool ok) { config.plan.block = ok ? threads : threads - warp_width() / 2; }
  static LIGER_DEVICE void run(const Args&) {}
};
struct TooMuchSharedMemory : Base {
  static void change(liger::launch::Launch& config, bool ok) {
    if (!ok) config.plan.smem = simt::profile().shared_per_block_optin + 4;
  }
  static LIGER_DEVICE void run(const Args&) {}
};

}  // namespace

int main(int count, char** arguments) {
  consider_all<MissingBarrier, MissingDoubleBuffer, RaceInWarp, StoreAfterLoads, StoreAfterLoadsInWarp, BlockStoreAfterLoads, RaceOnGlobal,
               BlockRace, ConditionalBarrier, GroupRace, MissingGroupDoubleBuffer, IncompleteGroup, PartialWarpGroup, DifferentBarriers,
               EarlyReturn, ShuffleBeyondWarp, UninitialisedShared, UninitialisedGlobal, SharedPastEnd, GlobalPastEnd, GapBetweenRows,
               StoreToInput, MisalignedVector, RowLeftOut, TailLeftOut, InputLeftOut, TooFewRowsDeclared, OtherMatrixDeclared,
               TooManyThreads, PartialWarp, TooMuchSharedMemory>(count, arguments);
}
