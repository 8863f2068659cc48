// Checks of the arguments of dequantize_4bit.
#pragma once
#include "checks/tensor.h"

namespace liger::LIGER_BACKEND {

// Requires a contiguous tensor, of any shape, with this number of elements and dtype on the device of packed.
inline void check_4bit_vector(const char* op, const Tensor& t, const char* name, const Size& size, const ScalarType& type,
                              const Tensor& packed) {
  check_device(op, t, name, packed, "packed");
  const ScalarType found = tensor_type(t);
  require(found == type, op, ": ", name, " has dtype ", dtype_name(found), ", expected ", dtype_name(type));
  require(t.numel() == size, op, ": ", name, " has shape ", shape_text(t), ", expected (", size, ")");
  require(t.is_contiguous(), op, ": ", name, " is not contiguous, expected a contiguous tensor");
}

inline void check_decoding(const char* op, const Tensor& packed, const Tensor& absmax, const OptionalTensor& absmax_code,
                           const OptionalTensor& absmax_scales, const OptionalTensor& absmax_offset, const Size& numel, int64_t code,
                           int64_t blocksize, int64_t absmax_blocksize, const ScalarType& dtype) {
  const auto is_blocksize = [](int64_t n, int64_t least) { return n >= least && n <= 4096 && (n & (n - 1)) == 0; };
  require(is_blocksize(blocksize, 32), op, ": blocksize is ", blocksize, ", expected a power of two from 32 to 4096");
  require(is_blocksize(absmax_blocksize, 1), op, ": absmax_blocksize is ", absmax_blocksize, ", expected a power of two from 1 to 4096");
  require(code == 0 || code == 1, op, ": code is ", code, ", expected 0 (nf4) or 1 (fp4)");
  const std::optional<Dtype> out = kernel_dtype(dtype);
  require(out && *out != Dtype::f64, op, ": dtype is ", dtype_name(dtype), ", expected float32, bfloat16 or float16");
  check_defined(op, packed, "packed");
  require(numel >= Size(0), op, ": the shape has ", numel, " elements, expected 0 or more");
  check_4bit_vector(op, packed, "packed", (numel + Size(1)) / Size(2), ScalarType::Byte, packed);
  const bool compressed = absmax_code.has_value();
  require(absmax_scales.has_value() == compressed && absmax_offset.has_value() == compressed, op,
          ": pass all of absmax_code, absmax_scales and absmax_offset, or none of them");
  const Size blocks = (numel + Size(blocksize - 1)) / Size(blocksize);
  check_4bit_vector(op, absmax, "absmax", blocks, compressed ? ScalarType::Byte : scalar_type(Dtype::f32), packed);
  if (!compressed) return;
  check_4bit_vector(op, *absmax_code, "absmax_code", Size(256), scalar_type(Dtype::f32), packed);
  check_4bit_vector(op, *absmax_scales, "absmax_scales", (blocks + Size(absmax_blocksize - 1)) / Size(absmax_blocksize),
                    scalar_type(Dtype::f32), packed);
  check_4bit_vector(op, *absmax_offset, "absmax_offset", Size(1), scalar_type(Dtype::f32), packed);
}

inline void check_dequantize_4bit(const Tensor& packed, const Tensor& absmax, const OptionalTensor& absmax_code,
                                  const OptionalTensor& absmax_scales, const OptionalTensor& absmax_offset, const Size& numel, int64_t code,
                                  int64_t blocksize, int64_t absmax_blocksize, const ScalarType& dtype) {
  check_decoding("dequantize_4bit", packed, absmax, absmax_code, absmax_scales, absmax_offset, numel, code, blocksize, absmax_blocksize,
                 dtype);
}

inline void check_dequantize_4bit_to(const Tensor& out, const Tensor& packed, const Tensor& absmax, const OptionalTensor& absmax_code,
                                     const OptionalTensor& absmax_scales, const OptionalTensor& absmax_offset, int64_t code,
                                     int64_t blocksize, int64_t absmax_blocksize) {
  const char* op = "dequantize_4bit_to_";
  check_defined(op, out, "out");
  require(out.dim() == 2, op, ": out has shape ", shape_text(out), ", expected (rows, columns)");
  check_device(op, packed, "packed", out, "out");
  check_decoding(op, packed, absmax, absmax_code, absmax_scales, absmax_offset, out.numel(), code, blocksize, absmax_blocksize,
                 tensor_type(out));
  require(out.is_contiguous() || (out.stride(1) == Size(1) && out.stride(0) >= out.size(1)), op, ": out has strides (", out.stride(0), ", ",
          out.stride(1), "), expected contiguous rows that do not overlap, since they are overwritten");
}

}  // namespace liger::LIGER_BACKEND
