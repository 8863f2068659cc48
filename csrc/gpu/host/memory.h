// Watches the memory of kernels that run on the host. Kernel sources are compiled with -fsanitize=thread, which makes the compiler
// call a function for every access to memory; here these functions are ours instead of the thread sanitizer's (memory.cpp), so that
// no access can go by unseen and no kernel is written differently. Found, to the granule of two bytes:
//   races                shared and global memory: two threads of a block without a barrier between them, one of which writes, also
//                        within a warp, where a warp barrier orders, but no shuffle; two blocks of a launch (global memory)
//   uninitialised reads  of shared memory, and of buffers that an op has allocated and not written
//   out of bounds        shared memory beyond what the launch asked for; global memory that is no part of the op's buffers, gaps
//                        between rows included; stores to an input
//   misaligned           an access of 2 to 16 bytes at an address that is not a multiple of that
// and, when they end,
//   uncovered            a launch that touches other elements of an op's matrices than the rows x columns that it declares
//   unwritten, unread    an op's call that has not written all of an output, or not read all of an input
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace liger::gpu::simt {

enum class Content { input, output, both };  // output: not written yet; both: written, and may be written again

// Runs of `bytes` at data + the sum of i * stride over up to three dimensions; strides in bytes. No data, or no runs: nothing.
struct Dimension {
  int64_t count = 1, stride = 0;
};
struct Buffer {
  const char* name;
  const void* data;
  int64_t bytes;
  Content content;
  Dimension dimensions[3] = {};
  int64_t element = 1;  // bytes
  int64_t row = 0;  // bytes from a row to the next; 0: none, for words about an offset
  int64_t each = 0;  // elements of it for each of the rows x columns of any launch that touches it; 0: not to be compared
  std::function<bool(int64_t offset)> optional = nullptr;  // says what need not be touched; null: nothing

  bool empty() const;
  int64_t extent() const;  // bytes from data to the end of the last run
  bool holds(int64_t offset, int64_t size) const;
  std::string at(int64_t offset) const;  // in words
  template <class F> void visit(int64_t step, const F& f) const {  // f(offset) in all runs, in steps
    const auto& [a, b, c] = dimensions;
    for (int64_t i = 0; i < a.count; ++i)
      for (int64_t j = 0; j < b.count; ++j)
        for (int64_t k = 0; k < c.count; ++k)
          for (int64_t at = 0; at < bytes; at += step) f(i * a.stride + j * b.stride + k * c.stride + at);
  }
};

// The buffers that launches may touch for as long as this lives; one at a time in a process.
class Buffers {
 public:
  Buffers(std::initializer_list<Buffer> given) : Buffers(std::vector<Buffer>(given)) {}
  explicit Buffers(const std::vector<Buffer>&);
  ~Buffers() noexcept(false);  // throws std::runtime_error, unless an exception is on its way, about what is unwritten or unread
  Buffers(const Buffers&) = delete;
};

// Memory that is not watched: the record of bad targets.
void allow(const void* data, size_t bytes);

// Between the scheduler and the watch.
namespace memory {
void begin_launch(const std::string& kernel, const void* args, size_t args_bytes, const unsigned char* stacks, size_t stack_bytes, int warp,
                  int shared_bytes);
void begin_blocks();  // a block, or all of a cluster
void check_launch(int64_t rows, int64_t cols);  // after the last block; throws std::runtime_error
void end_launch();
void begin_thread(int thread);  // accesses are this thread's from here on; -1: nobody's, they are not watched
void at_block_barrier();
void at_group_barrier(int first_warp, int end_warp);
void at_warp_barrier(int warp);
unsigned char* shared();
void load_global(const void* from, int64_t bytes, const void* code);  // by the instruction before `code`
}  // namespace memory

}  // namespace liger::gpu::simt
