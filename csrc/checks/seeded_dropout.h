// Checks of the arguments of seeded_dropout and seeded_dropout_add_.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

inline void check_dropout(const char* op, const Tensor& x, const Tensor& seed, int64_t stream, Size count, int64_t first_row, double p) {
  check_dtype(op, x, "x");
  check_device(op, seed, "seed", x, "x");
  require(tensor_type(seed) == ScalarType::Long, op, ": seed has dtype ", dtype_name(tensor_type(seed)), ", expected torch.int64");
  require(seed.numel() == Size(1), op, ": seed has shape ", shape_text(seed), ", expected one element");
  const int64_t streams = int64_t{1} << 31;
  require(stream >= 0 && stream < streams, op, ": stream is ", stream, ", expected 0 or more, and less than 2**31");
  require(count >= Size(1) && count <= Size(streams - stream), op, ": count is ", count,
          ", expected 1 or more masks, of streams below 2**31");
  require(first_row >= 0, op, ": first_row is ", first_row, ", expected 0 or more");
  require(p >= 0 && p <= 1, op, ": p is ", p, ", expected a probability from 0 to 1");
}

inline void check_seeded_dropout(const Tensor& x, const Tensor& seed, int64_t stream, int64_t count, int64_t first_row, double p) {
  const char* op = "seeded_dropout";
  check_defined(op, x, "x");
  require(x.dim() == 2, op, ": x has shape ", shape_text(x), ", expected (rows, columns)");
  check_dropout(op, x, seed, stream, Size(count), first_row, p);
}

inline void check_seeded_dropout_add(const Tensor& total, const Tensor& x, const Tensor& seed, int64_t stream, int64_t first_row,
                                     double p) {
  const char* op = "seeded_dropout_add_";
  check_defined(op, x, "x");
  require(x.dim() == 3, op, ": x has shape ", shape_text(x), ", expected (masks, rows, columns)");
  check_dropout(op, x, seed, stream, x.size(0), first_row, p);
  check_device(op, total, "total", x, "x");
  check_shape(op, total, "total", {x.size(1), x.size(2)});
  check_dtype(op, total, "total");
  const ScalarType f64 = scalar_type(Dtype::f64), found = tensor_type(total);
  require((found == f64) == (tensor_type(x) == f64), op, ": total has dtype ", dtype_name(found), ", x has ", dtype_name(tensor_type(x)),
          ", expected float64 for both or neither");
  if (total.is_contiguous()) return;
  require(total.stride(1) == Size(1) && total.stride(0) >= total.size(1), op, ": total has strides (", total.stride(0), ", ",
          total.stride(1), "), expected contiguous rows that do not overlap, since they are overwritten");
}

}  // namespace liger::LIGER_BACKEND
