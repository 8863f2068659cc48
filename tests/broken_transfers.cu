// Broken kernels for GPUs with clusters and copies to shared memory (csrc/gpu/host/transfers.h): see broken_kernels.h.
#include "broken_kernels.h"

namespace {

constexpr int bytes = threads * int(sizeof(float));

LIGER_DEVICE Shared<Mbarrier> one_mbarrier() {
  const Shared<Mbarrier> mbarrier = shared<Mbarrier>(bytes);
  if (thread_id() == 0) init_mbarrier(mbarrier);
  block_barrier();
  return mbarrier;
}
// Copies `in`, announced as `announced` bytes.
LIGER_DEVICE void request(const KernelArgs& a, Shared<Mbarrier> mbarrier, int announced = bytes) {
  if (thread_id() != 0) return;
  expect_bytes(mbarrier, announced);
  bulk_copy(shared<float>(0), a.in, bytes, mbarrier);
}

struct UnannouncedPhase : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<Mbarrier> mbarrier = one_mbarrier();
    for (int round = 0; round < 2; ++round) {
      if (thread_id() == 0 && (!a.broken() || round == 0)) expect_bytes(mbarrier, 0);
      wait_for_phase(mbarrier, round);
      block_barrier();
    }
  }
};
struct MissingBytes : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<Mbarrier> mbarrier = one_mbarrier();
    request(a, mbarrier, a.broken() ? bytes + 16 : bytes);
    wait_for_phase(mbarrier, 0);
  }
};
struct TooManyBytes : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<Mbarrier> mbarrier = one_mbarrier();
    request(a, mbarrier, a.broken() ? bytes - 16 : bytes);
    wait_for_phase(mbarrier, 0);
  }
};
struct LoadWithoutWait : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<Mbarrier> mbarrier = one_mbarrier();
    request(a, mbarrier);
    if (!a.broken() || warp_id() != 1) wait_for_phase(mbarrier, 0);
    a.row()[thread_id()] = shared<float>(0)[thread_id()];
  }
};
struct WaitForTheOtherParity : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<Mbarrier> mbarrier = one_mbarrier();
    if (thread_id() == 0) expect_bytes(mbarrier, bytes);
    wait_for_phase(mbarrier, 1);  // the phase before the first one has ended: returns at once
    block_barrier();
    if (thread_id() == 0) bulk_copy(shared<float>(0), a.in, bytes, mbarrier);
    if (!a.broken()) wait_for_phase(mbarrier, 0);
    else if (warp_id() > 0) wait_for_phase(mbarrier, 1);
  }
};
// Two copies to the same place, one after the other.
struct RepeatedCopy : Base {
  static LIGER_DEVICE void run(const Args& a, bool fenced, bool ordered) {
    const Shared<Mbarrier> mbarrier = one_mbarrier();
    for (int round = 0; round < 2; ++round) {
      request(a, mbarrier);
      wait_for_phase(mbarrier, round);
      a.row()[thread_id()] = shared<float>(0)[thread_id()];
      if (fenced) finish_reads_before_copies();
      if (ordered) block_barrier();
    }
  }
};
struct CopyOverLoads : RepeatedCopy {
  static LIGER_DEVICE void run(const Args& a) { RepeatedCopy::run(a, true, !a.broken()); }
};
struct MissingFence : RepeatedCopy {
  static LIGER_DEVICE void run(const Args& a) { RepeatedCopy::run(a, !a.broken() || thread_id() != 77, true); }
};
struct EndBeforeTheCopy : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<Mbarrier> mbarrier = one_mbarrier();
    request(a, mbarrier);
    if (!a.broken()) wait_for_phase(mbarrier, 0);
  }
};
struct MbarrierWithoutBarrier : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<Mbarrier> mbarrier = shared<Mbarrier>(bytes);
    if (thread_id() == 0) init_mbarrier(mbarrier);
    if (!a.broken()) block_barrier();
    if (thread_id() == 0) expect_bytes(mbarrier, 0);
    wait_for_phase(mbarrier, 0);
  }
};
struct AsynchronousCopy : Base {
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> buffer = shared<float>(0) + thread_id() % 32 * 4;
    if (warp_id() > 0) return;
    async_copy(buffer, a.in + thread_id() * 4);
    close_copies();
    async_copy(buffer + threads, a.in + thread_id() * 4);
    close_copies();
    wait_for_copies(a.broken() && thread_id() == 3 ? 2 : 1);
    a.row()[thread_id()] = buffer[0];
    wait_for_copies(0);
  }
};
struct EndBeforeAsynchronousCopies : Base {
  static LIGER_DEVICE void run(const Args& a) {
    if (thread_id() >= 32) return;
    async_copy(shared<float>(0) + thread_id() * 4, a.in + thread_id() * 4);
    close_copies();
    if (!a.broken()) wait_for_copies(0);
  }
};

// Blocks of a cluster of two that send each other a float, round after round.
struct Exchange : Base {
  static constexpr int cluster = 2;
  // waits: whether this block waits before it sends. buffers: the number used in turn. rounds: those in which this block takes part.
  static LIGER_DEVICE void run(const Args& a, bool waits, int buffers, int rounds) {
    const Shared<Mbarrier> mbarriers = shared<Mbarrier>(bytes);
    if (thread_id() == 0)
      for (int i = 0; i < buffers; ++i) init_mbarrier(mbarriers + i);
    cluster_arrive();
    if (waits) cluster_wait();
    if (warp_id() > 0) return;
    for (int round = 0; round < rounds; ++round) {
      const int buffer = round % buffers;
      const Shared<float> values = shared<float>(0) + buffer * 2;
      if (thread_id() == 0) expect_bytes(mbarriers + buffer, 2 * int(sizeof(float)));
      if (thread_id() < 2) send(values + cluster_rank(), mbarriers + buffer, thread_id(), 1);
      wait_for_phase(mbarriers + buffer, round / buffers & 1);
      if (cluster_rank() == 0) a.out[block_id() / 2 * row_floats + thread_id()] = values[0] + values[1];
    }
  }
};
struct MessageWithoutClusterBarrier : Exchange {
  static LIGER_DEVICE void run(const Args& a) { Exchange::run(a, !a.broken(), 2, 1); }
};
struct MessageOverLoads : Exchange {
  static LIGER_DEVICE void run(const Args& a) { Exchange::run(a, true, a.ok ? 2 : 1, 3); }
};
struct EndBeforeTheMessage : Exchange {
  static LIGER_DEVICE void run(const Args& a) { Exchange::run(a, true, 2, a.broken() ? 0 : 1); }
};
struct MissingClusterBarrier : Exchange {
  static LIGER_DEVICE void run(const Args& a) {
    if (a.broken()) return;
    cluster_arrive();
    cluster_wait();
  }
};

}  // namespace

int main(int count, char** arguments) {
  consider_all<UnannouncedPhase, MissingBytes, TooManyBytes, LoadWithoutWait, WaitForTheOtherParity, CopyOverLoads, MissingFence,
               EndBeforeTheCopy, MbarrierWithoutBarrier, AsynchronousCopy, EndBeforeAsynchronousCopies, MessageWithoutClusterBarrier,
               MessageOverLoads, EndBeforeTheMessage, MissingClusterBarrier>(count, arguments);
}
