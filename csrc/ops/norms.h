// What the backwards of the norms give: rms_norm, add_rms_norm, layer_norm (norms.cpp) and group_norm.
#pragma once
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

// The gradients that are wanted, as far as there are such parameters; the others are empty.
struct NormGradients {
  Tensor dx, dweight, dbias;
  bool wanted;

  NormGradients(const Scope& scope, const Tensor& x, const OptionalTensor& weight, const std::optional<ScalarType>& bias_dtype,
                int64_t channels, bool need_dx, bool need_dweight, bool need_dbias) {
    need_dweight = need_dweight && weight;
    need_dbias = need_dbias && bias_dtype;
    wanted = need_dx || need_dweight || need_dbias;
    dx = allocate(scope, need_dx ? sizes_of(x) : std::vector<int64_t>{0}, type_of(x), x);
    dweight = allocate(scope, {need_dweight ? channels : 0}, type_of(weight ? *weight : x), x);
    dbias = allocate(scope, {need_dbias ? channels : 0}, bias_dtype.value_or(type_of(x)), x);
  }

  // Is there nothing to compute? The sums over no elements are 0.
  bool complete(const Tensor& x) const {
    if (x.numel() == 0) zero({dweight, dbias});
    return !wanted || x.numel() == 0;
  }
};

}  // namespace liger::LIGER_BACKEND
