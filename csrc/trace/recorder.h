// Recorder: the allocations, matmuls and kernel launches of an op, recorded without running it.
//
// The sources of ops/ for the fused loss are compiled for the CPU, for the GPU, and a third time for the trace: with tensors without data
// (trace/tensor.h) and with kernel functions that record their call (kernels.cpp). So the memory, time and launches of a plan follow from
// the code that executes the plan, on any machine.
#pragma once
#include <cstdint>
#include <vector>

#include "launch/launch.h"
#include "launch/rates.h"

namespace liger::trace {

class Recorder {
 public:
  // gpu: null for a CPU. lists: also fill the lists `matmuls` and `kernels`; without them a trace takes a few microseconds.
  Recorder(const launch::DeviceProfile* gpu, const launch::Rates& rates, bool lists) : gpu(gpu), rates(rates), lists(lists) {}

  // A matrix product [m, k] x [k, n]. operand_bytes and result_bytes are of one element. accumulates: the product is added to the result's
  // old values.
  struct Matmul {
    int64_t m, n, k, operand_bytes, result_bytes;
    bool accumulates;
    int64_t times;
  };
  struct Kernel {
    launch::Launch launch;
    int64_t times;
  };

  const launch::DeviceProfile* const gpu;
  const launch::Rates& rates;
  const launch::Knobs* knobs = nullptr;
  const bool lists;
  int64_t times = 1;  // the number of equal chunks that the next events stand for

  int64_t live = 0, peak = 0;  // bytes
  int64_t multiplications = 0;  // of all matmuls: the sum of m * n * k
  double seconds = 0;           // estimated time
  std::vector<Matmul> matmuls;
  std::vector<Kernel> kernels;

  // Returns an address that no other allocation has.
  char* allocate(int64_t bytes) {
    if (counts) live += bytes, peak = live > peak ? live : peak;
    if (counts && rates.fresh > 0 && bytes >= fresh_min_bytes) seconds += double(times * bytes) / rates.fresh;
    char* const address = next_ + offset;
    next_ += (bytes + 1023) / 512 * 512;
    return address;
  }
  static constexpr int64_t fresh_min_bytes = 32 << 20;  // a CPU's allocator reuses memory for smaller allocations
  void release(int64_t bytes) { live -= bytes; }
  bool counts = true;  // false while the arguments of the call are allocated: their memory does not count
  int64_t offset = 0;  // bytes added to every address; 0: addresses are aligned
  // Counts a scratch buffer that is freed at once.
  void scratch(int64_t bytes) { peak = live + bytes > peak ? live + bytes : peak; }

 private:
  char* next_ = reinterpret_cast<char*>(int64_t{1} << 20);
};

}  // namespace liger::trace
