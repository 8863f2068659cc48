// torch's parallel_for for ThreadSanitizer, which is linked into the library and takes the place of torch's: threads that the sanitizer
// sees begin and end. It knows nothing of those that torch keeps (OpenMP's, compiled without it), so that whatever such a thread shares
// with the one that started it would look like a race. torch gives short loops one thread; here every loop of four items has four.
//
// A body does not throw (cpu/dispatch.h): here one that does ends the process, where torch would pass its exception on.
#include <torch/csrc/stable/ops.h>

#include <thread>
#include <vector>

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body, void* context) {
  constexpr int64_t parts = 4;
  const auto first = [&](int64_t part) { return begin + (end - begin) * part / parts; };
  std::vector<std::jthread> threads;
  for (int64_t part = 0; part < parts; ++part)
    if (first(part) < first(part + 1)) threads.emplace_back(body, first(part), first(part + 1), context);
  return AOTI_TORCH_SUCCESS;   // each thread is waited for where `threads` ends
}

// A race, so that sanitize.sh can see that one ends the run: four threads add to one number.
extern "C" __attribute__((visibility("default"))) void liger_ext_planted_race() {
  static int64_t sum = 0;
  torch::stable::parallel_for(0, 100, 1, [](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
}
