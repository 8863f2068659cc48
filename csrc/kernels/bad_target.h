// The error for a target that is neither a class nor ignore_index. On a CPU, a check of a call's targets throws it before a kernel uses
// them as indices. On a GPU, a kernel records the target, and the host throws the error at the start of a later op (raise_reported_targets
// in kernels/device.h).
#pragma once
#include <cstdint>

#include "kernels/errors.h"

namespace liger {

// liger_ext/ops/count_rows.py writes this value over the targets of the listed rows if a row that is not listed has a target other than
// ignore_index. So throw_bad_target can name the cause: no class and no ignore_index is likely to have this value.
constexpr int64_t rows_left_out = -7'305'431'802'964'118'153;

[[noreturn]] inline void throw_bad_target(const char* op, int64_t row, int64_t target, int64_t classes, const std::string& ignore_index) {
  require(target != rows_left_out, op,
          ": rows leaves out a row whose target is not ignore_index: rows was counted for other targets, for another ignore_index, or with "
          "too few max_rows. Call count_rows with the target and the ignore_index of this loss");
  throw std::out_of_range(text(op, ": target[", row, "] is ", target, ", expected a class in [0, ", classes, ") or ", ignore_index));
}

}  // namespace liger
