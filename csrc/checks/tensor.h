// The checks that several ops share. checks/<op>.h has a function for each op of a family, and two callers run it. boxed() (ops/boxed.h)
// runs it before the op, on torch's tensors. register_fake() (liger_ext/ops/_register.py) runs it before the fake implementation, on
// Python's tensors without data, whose sizes may be symbols. ops/tensor.h and python/tensor.h declare the same names for the two kinds of
// tensors.
//
// A check throws std::invalid_argument, whose text names the argument and the expected value. A check that passes builds no text.
#pragma once
#ifdef LIGER_IS_GPU
#include "ops/tensor.h"
#else
#include "python/tensor.h"
#endif

#include <algorithm>
#include <vector>

#include "kernels/errors.h"

namespace liger::LIGER_BACKEND {

// A shape that becomes the text "(2, 3)" if a message is built.
struct ShapeText {
  const Tensor& tensor;
};
inline void append(std::string& text, const ShapeText& shape) {
  using liger::append;  // of numbers
  const char* separator = "(";
  for (const Size& size : shape.tensor.sizes()) {
    text += separator;
    append(text, size);
    separator = ", ";
  }
  text += shape.tensor.dim() == 0 ? "()" : ")";
}
inline ShapeText shape_text(const Tensor& t) { return {t}; }

// The dtype of a tensor, or of an argument that is a dtype itself. Throws if kernels do not support it on the device of `like`.
inline Dtype check_dtype(const char* op, const ScalarType& type, const char* name, const Tensor& like, const char* is = " is ") {
  const std::optional<Dtype> found = kernel_dtype(type);
  const bool float64 = takes_float64(like);
  require(found && (float64 || *found != Dtype::f64), op, ": ", name, is, dtype_name(type), ", expected float32, bfloat16 or float16",
          float64 ? ", or float64" : " (float64 works on the CPU only)");
  return *found;
}
inline Dtype check_dtype(const char* op, const Tensor& t, const char* name) {
  return check_dtype(op, tensor_type(t), name, t, " has dtype ");
}

// The dtype of a tensor that has passed a check.
inline Dtype tensor_dtype(const Tensor& t, const char* name) { return check_dtype("liger_ext", t, name); }

// torch's dispatcher accepts None for a tensor.
inline void check_defined(const char* op, const Tensor& t, const char* name) {
  require(t.defined(), op, ": ", name, " is None, expected a tensor");
}

inline void check_device(const char* op, const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  check_defined(op, t, name);
  require(same_device(t, like), op, ": ", name, " is on another device than ", like_name, "; move both to one device");
}

inline void check_shape(const char* op, const Tensor& t, const char* name, const std::vector<Size>& shape) {
  const auto sizes = t.sizes();
  if (std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) return;
  std::string expected;
  for (const Size& n : shape) expected += text(expected.empty() ? "" : ", ", n);
  throw std::invalid_argument(text(op, ": ", name, " has shape ", shape_text(t), ", expected (", expected, ")"));
}

inline void check_same_dtype(const char* op, const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  const ScalarType found = tensor_type(t), expected = tensor_type(like);
  require(found == expected, op, ": ", name, " has dtype ", dtype_name(found), ", expected that of ", like_name, ", ",
          dtype_name(expected));
}

// Requires rows over the last dimension, in a dtype that kernels support.
inline void check_rows(const char* op, const Tensor& t, const char* name) {
  check_defined(op, t, name);
  require(t.dim() >= 1, op, ": ", name, " has no dimensions, expected at least one");
  check_dtype(op, t, name);
}
inline Size column_count(const Tensor& t) { return t.size(t.dim() - 1); }
inline Size row_count(const Tensor& t) {
  Size rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows = rows * t.size(i);
  return rows;
}

// Requires the device and the shape of `like`, and a dtype that kernels support.
inline void check_like(const char* op, const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  check_device(op, t, name, like, like_name);
  const auto sizes = t.sizes(), expected = like.sizes();
  require(std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end()), op, ": ", name, " has shape ", shape_text(t),
          ", expected that of ", like_name, ", ", shape_text(like));
  check_dtype(op, t, name);
}
// Requires the dtype of `like`, too.
inline void check_same(const char* op, const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  check_like(op, t, name, like, like_name);
  check_same_dtype(op, t, name, like, like_name);
}

// An optional vector of parameters, in any dtype that kernels support.
inline void check_parameter(const char* op, const OptionalTensor& parameter, const char* name, const Size& size, const Tensor& like,
                            const char* like_name) {
  if (!parameter) return;
  check_device(op, *parameter, name, like, like_name);
  check_shape(op, *parameter, name, {size});
  check_dtype(op, *parameter, name);
}

// Requires a tensor as the forward returned it: of this shape and dtype, contiguous.
inline void check_forward_result(const char* op, const Tensor& t, const char* name, const std::vector<Size>& shape, Dtype dtype,
                                 const Tensor& like, const char* like_name) {
  check_device(op, t, name, like, like_name);
  check_shape(op, t, name, shape);
  require(tensor_type(t) == scalar_type(dtype), op, ": ", name, " has dtype ", dtype_name(tensor_type(t)), ", expected ",
          dtype_name(scalar_type(dtype)));
  require(t.is_contiguous(), op, ": ", name, " is not what the forward returned");
}

}  // namespace liger::LIGER_BACKEND
