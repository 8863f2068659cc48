// Checks of the arguments of dequantize_4bit.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

// Requires a contiguous vector of this size and dtype on the device of packed.
inline void check_4bit_vector(const Tensor& t, const char* name, const Size& size, const ScalarType& type, const Tensor& packed) {
  const char* op = "dequantize_4bit";
  check_device(op, t, name, packed, "packed");
  const ScalarType found = tensor_type(t);
  require(found == type, op, ": ", name, " has dtype ", dtype_name(found), ", expected ", dtype_name(type));
  check_shape(op, t, name, {size});
  require(t.is_contiguous(), op, ": ", name, " is not contiguous, expected a contiguous tensor");
}

inline void check_dequantize_4bit(const Tensor& packed, const Tensor& absmax, const OptionalTensor& absmax_code,
                                  const OptionalTensor& absmax_scales, const OptionalTensor& absmax_offset, const Size& numel, int64_t code,
                                  int64_t blocksize, int64_t absmax_blocksize, const ScalarType& dtype) {
  const char* op = "dequantize_4bit";
  const auto is_blocksize = [](int64_t n, int64_t least) { return n >= least && n <= 4096 && (n & (n - 1)) == 0; };
  require(is_blocksize(blocksize, 32), op, ": blocksize is ", blocksize, ", expected a power of two from 32 to 4096");
  require(is_blocksize(absmax_blocksize, 1), op, ": absmax_blocksize is ", absmax_blocksize, ", expected a power of two from 1 to 4096");
  require(code == 0 || code == 1, op, ": code is ", code, ", expected 0 (nf4) or 1 (fp4)");
  const std::optional<Dtype> out = kernel_dtype(dtype);
  require(out && *out != Dtype::f64, op, ": dtype is ", dtype_name(dtype), ", expected float32, bfloat16 or float16");
  check_defined(op, packed, "packed");
  require(numel >= Size(0), op, ": the shape has ", numel, " elements, expected 0 or more");
  check_4bit_vector(packed, "packed", (numel + Size(1)) / Size(2), ScalarType::Byte, packed);
  const bool compressed = absmax_code.has_value();
  require(absmax_scales.has_value() == compressed && absmax_offset.has_value() == compressed, op,
          ": pass all of absmax_code, absmax_scales and absmax_offset, or none of them");
  const Size blocks = (numel + Size(blocksize - 1)) / Size(blocksize);
  check_4bit_vector(absmax, "absmax", blocks, compressed ? ScalarType::Byte : scalar_type(Dtype::f32), packed);
  if (!compressed) return;
  check_4bit_vector(*absmax_code, "absmax_code", Size(256), scalar_type(Dtype::f32), packed);
  check_4bit_vector(*absmax_scales, "absmax_scales", (blocks + Size(absmax_blocksize - 1)) / Size(absmax_blocksize),
                    scalar_type(Dtype::f32), packed);
  check_4bit_vector(*absmax_offset, "absmax_offset", Size(1), scalar_type(Dtype::f32), packed);
}

}  // namespace liger::LIGER_BACKEND
