// A parallel_for for ThreadSanitizer, which is linked into the library and replaces torch's: the sanitizer sees its threads begin and end.
// It does not see those that torch keeps (OpenMP's, compiled without it), so all data that such a thread shares with the thread that
// started it would look like a race. torch runs short loops on one thread; here every loop of four items has four.
//
// A body must not throw (cpu/dispatch.h): here an exception ends the process, where torch would pass it on.
#include <torch/csrc/stable/ops.h>

#include <thread>
#include <vector>

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body, void* context) {
  constexpr int64_t parts = 4;
  const auto first = [&](int64_t part) { return begin + (end - begin) * part / parts; };
  std::vector<std::jthread> threads;
  for (int64_t part = 0; part < parts; ++part)
    if (first(part) < first(part + 1)) threads.emplace_back(body, first(part), first(part + 1), context);
  return AOTI_TORCH_SUCCESS;   // the end of `threads` joins each thread
}

// A race, by which sanitize.sh checks that a race ends the run: four threads add to one number.
extern "C" __attribute__((visibility("default"))) void liger_ext_planted_race() {
  static int64_t sum = 0;
  torch::stable::parallel_for(0, 100, 1, [](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
}
