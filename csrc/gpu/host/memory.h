// Checks the memory accesses of kernels that run on the host. Kernel sources are compiled with -fsanitize=thread, which makes the compiler
// call a function for each access to memory that threads can share. memory.cpp implements these functions in place of the thread sanitizer,
// so that kernels are checked without calls in their sources. The checks find, for each two bytes of memory:
//   races                two threads of a block access the same shared or global memory without a barrier between them, and one of them
//                        writes; also within a warp, where a warp barrier orders accesses, but a shuffle does not. Or two blocks of a
//                        launch access the same global memory, and one of them writes
//   uninitialised reads  of shared memory, and of buffers that an op has allocated and not written
//   out of bounds        shared memory beyond the size in the launch; global memory outside of the op's buffers, including gaps between
//                        rows; stores to an input
//   misaligned           an access of 2 to 16 bytes at an address that is not a multiple of its size
// and, at the end of the launch or the op,
//   uncovered            a launch that touches another number of elements of an op's matrices than the rows x columns that it declares
//   unwritten, unread    an op that has not written all of an output, or not read all of an input
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace liger::gpu::simt {

enum class Content { input, output, both };  // output: not written yet; both: already written, and kernels overwrite it

// Runs of `bytes` bytes at data + the sum of i * stride over up to three dimensions; strides in bytes. Empty if data is null or a count is
// 0.
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
  int64_t row = 0;  // bytes from a row to the next, for messages; 0: no rows
  int64_t each = 0;  // elements of the buffer per element of a launch's rows x columns; 0: not compared
  std::function<bool(int64_t offset)> optional = nullptr;  // returns whether these bytes may stay untouched; null: none may

  bool empty() const;
  int64_t extent() const;  // bytes from data to the end of the last run
  bool holds(int64_t offset, int64_t size) const;
  std::string at(int64_t offset) const;  // text for messages
  template <class F> void visit(int64_t step, const F& f) const {  // calls f(offset) in all runs, in steps of `step`
    const auto& [a, b, c] = dimensions;
    for (int64_t i = 0; i < a.count; ++i)
      for (int64_t j = 0; j < b.count; ++j)
        for (int64_t k = 0; k < c.count; ++k)
          for (int64_t at = 0; at < bytes; at += step) f(i * a.stride + j * b.stride + k * c.stride + at);
  }
};

// The buffers that launches may touch during the lifetime of this object. A process has at most one such object at a time.
class Buffers {
 public:
  Buffers(std::initializer_list<Buffer> declared) : Buffers(std::vector<Buffer>(declared)) {}
  explicit Buffers(const std::vector<Buffer>&);
  ~Buffers() noexcept(false);  // throws std::runtime_error about unwritten or unread memory, unless an exception is in flight
  Buffers(const Buffers&) = delete;
};

// Excludes memory from the checks: the record of bad targets.
void exclude_from_checks(const void* data, size_t bytes);

// The functions that the scheduler (simt.cpp) and transfers.cpp call.
namespace memory {
void begin_launch(const std::string& kernel, const void* args, size_t args_bytes, const unsigned char* stacks, size_t stack_bytes, int warp,
                  int shared_bytes);
void begin_blocks();  // of one block, or of all blocks of a cluster
void check_launch(int64_t rows, int64_t cols);  // after the last block; throws std::runtime_error
void end_launch();
void begin_thread(int thread);  // from here on accesses are this thread's; -1: they are not checked
void at_block_barrier();
void at_group_barrier(int first_warp, int end_warp);
void at_warp_barrier(int warp);
unsigned char* shared();
void load_global(const void* from, int64_t bytes, const void* code);  // checks a load by the instruction before `code`
}  // namespace memory

}  // namespace liger::gpu::simt
