// Softcap of logits, x' = cap * tanh(x / cap) (arXiv:2408.00118, section 2), and its derivative from x' alone.
// M and V as in math/activation.h; S is M::scalar.
#pragma once
#include "math/qualifiers.h"

namespace liger::math {

template <class M, class V, class S> LIGER_FN V softcap(V x, S cap) { return cap * M::tanh(x * (S(1) / cap)); }

template <class V, class S> LIGER_FN V softcap_slope(V capped, S cap) {
  const V t = capped * (S(1) / cap);
  return S(1) - t * t;
}

}  // namespace liger::math
