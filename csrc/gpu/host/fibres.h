// Fibres that run the threads of kernels: each fibre runs on a stack of its own until it suspends itself. ucontext starts a fibre; longjmp
// suspends and resumes it. A fibre outlives its kernel: the thread with the same number in the next kernel runs on it.
#pragma once
#include <setjmp.h>

#include <cstddef>

#include "gpu/host/simt.h"

namespace liger::gpu::simt {

#if defined(LIGER_HOST_AHEAD)
constexpr int max_threads = most_blocks * most_threads;  // that exist at a time
#else
constexpr int max_threads = most_threads;
#endif

class Fibres {
 public:
  explicit Fibres(void (*body)()) : body_(body) {}  // body: the function that every fibre runs; it does not return

  void allocate_stacks();
  const unsigned char* stacks() const { return stacks_; }
  static size_t stacks_bytes();

  // Runs fibre `id` until it suspends itself.
  void resume(int id);
  // Fibre `id` itself calls this: resume() returns, and the next resume() continues behind this call.
  void suspend(int id);
  // The same, but the fibre does not continue here: the next resume() starts it anew.
  [[noreturn]] void abandon(int id);
  // For a suspended fibre: the next resume() starts it anew.
  void start_anew(int id) { fibres_[id].exists = false; }

 private:
  struct Fibre {
    jmp_buf resume_at;
    bool exists = false;
  };
  void (*body_)();
  unsigned char* stacks_ = nullptr;
  jmp_buf scheduler_;
  Fibre fibres_[max_threads];
};

}  // namespace liger::gpu::simt
