#include "gpu/host/fibres.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <new>

namespace liger::gpu::simt {

// A frame of a kernel is a few KiB; the lowest page of each stack is a guard.
constexpr size_t stack_bytes = 256 << 10, page_bytes = 4096;

size_t Fibres::stacks_bytes() { return stack_bytes * max_threads; }

void Fibres::allocate_stacks() {
  if (stacks_ != nullptr) return;
  void* const mapped = mmap(nullptr, stacks_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  stacks_ = static_cast<unsigned char*>(mapped);
  for (int id = 0; id < max_threads; ++id) mprotect(stacks_ + id * stack_bytes, page_bytes, PROT_NONE);
}

void Fibres::resume(int id) {
  if (_setjmp(scheduler_)) return;
  Fibre& fibre = fibres_[id];
  if (fibre.exists) _longjmp(fibre.resume_at, 1);
  fibre.exists = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks_ + id * stack_bytes;
  context.uc_stack.ss_size = stack_bytes;
  makecontext(&context, body_, 0);
  setcontext(&context);
}

void Fibres::suspend(int id) {
  if (!_setjmp(fibres_[id].resume_at)) _longjmp(scheduler_, 1);
}

void Fibres::abandon(int id) {
  start_anew(id);
  _longjmp(scheduler_, 1);
}

}  // namespace liger::gpu::simt
