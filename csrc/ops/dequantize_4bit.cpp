#include "kernels/dequantize_4bit.h"

#include "checks/dequantize_4bit.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

void decode(const Scope& scope, int64_t rows, int64_t cols, const MutableRows& out, const Tensor& packed, const Tensor& absmax,
            const OptionalTensor& absmax_code, const OptionalTensor& absmax_scales, const OptionalTensor& absmax_offset, int64_t code,
            int64_t blocksize, int64_t absmax_blocksize) {
  if (rows * cols == 0) return;
  const bool has_gaps = out.stride != cols;
  const auto floats = [](const OptionalTensor& t) { return t ? static_cast<const float*>(t->data_ptr()) : nullptr; };
  dequantize_4bit({has_gaps ? rows : 1, has_gaps ? cols : rows * cols, static_cast<const uint8_t*>(packed.data_ptr()), absmax.data_ptr(),
                   floats(absmax_code), floats(absmax_scales), floats(absmax_offset), Code4bit(code), blocksize, absmax_blocksize, out},
                  scope);
}

Tensor dequantize_4bit_op(Tensor packed, Tensor absmax, OptionalTensor absmax_code, OptionalTensor absmax_scales,
                          OptionalTensor absmax_offset, int64_t numel, int64_t code, int64_t blocksize, int64_t absmax_blocksize,
                          ScalarType dtype) {
  const Scope scope("dequantize_4bit", packed);
  Tensor out = allocate(scope, {numel}, *kernel_dtype(dtype), packed);
  decode(scope, 1, numel, mutable_rows(out), packed, absmax, absmax_code, absmax_scales, absmax_offset, code, blocksize, absmax_blocksize);
  return out;
}

void dequantize_4bit_to_op(Tensor out, Tensor packed, Tensor absmax, OptionalTensor absmax_code, OptionalTensor absmax_scales,
                           OptionalTensor absmax_offset, int64_t code, int64_t blocksize, int64_t absmax_blocksize) {
  const Scope scope("dequantize_4bit_to_", out);
  const MutableRows rows{out.data_ptr(), out.stride(0), tensor_dtype(out)};
  decode(scope, out.size(0), out.size(1), rows, packed, absmax, absmax_code, absmax_scales, absmax_offset, code, blocksize,
         absmax_blocksize);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("dequantize_4bit", boxed<dequantize_4bit_op, check_dequantize_4bit>);
  m.impl("dequantize_4bit_to_", boxed<dequantize_4bit_to_op, check_dequantize_4bit_to>);
}

}  // namespace liger::LIGER_BACKEND
