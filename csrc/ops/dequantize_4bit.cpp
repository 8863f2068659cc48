#include "kernels/dequantize_4bit.h"

#include "checks/dequantize_4bit.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {
namespace {

Tensor dequantize_4bit_op(Tensor packed, Tensor absmax, OptionalTensor absmax_code, OptionalTensor absmax_scales,
                          OptionalTensor absmax_offset, int64_t numel, int64_t code, int64_t blocksize, int64_t absmax_blocksize,
                          ScalarType dtype) {
  const Scope scope("dequantize_4bit", packed);
  Tensor out = allocate(scope, {numel}, *kernel_dtype(dtype), packed);
  const auto floats = [](const OptionalTensor& t) { return t ? static_cast<const float*>(t->data_ptr()) : nullptr; };
  if (numel > 0)
    dequantize_4bit({numel, static_cast<const uint8_t*>(packed.data_ptr()), absmax.data_ptr(), floats(absmax_code), floats(absmax_scales),
                     floats(absmax_offset), Code4bit(code), blocksize, absmax_blocksize, mutable_vector(out)},
                    scope);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) { m.impl("dequantize_4bit", boxed<dequantize_4bit_op, check_dequantize_4bit>); }

}  // namespace liger::LIGER_BACKEND
