// An op that throws, registered as liger_ext's ops are: for test_errors.py.
#include <torch/csrc/stable/tensor.h>

#include <new>

#include "kernels/errors.h"
#include "ops/boxed.h"

namespace {

void unchecked(const torch::stable::Tensor& x, int64_t kind) {}

torch::stable::Tensor raised(torch::stable::Tensor x, int64_t kind) {
  if (kind == 0) throw std::invalid_argument("x is 1, expected 2");
  if (kind == 1) throw std::length_error("x has too many rows");
  if (kind == 2) throw std::out_of_range("target[0] is 9");
  if (kind == 3) throw std::bad_alloc();
  if (kind == 4) throw liger::OutOfMemory("out of memory");
  if (kind == 5) throw std::runtime_error("no code for this GPU");
  return x;
}

}  // namespace

STABLE_TORCH_LIBRARY(liger_ext_raised, m) { m.def("raised(Tensor x, int kind) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(liger_ext_raised, CPU, m) { m.impl("raised", liger::boxed<raised, unchecked>); }
