// Arguments of ops with a language-model head (ops/head.h), whose logits go through in chunks (ops/fused_linear.h).
#pragma once
#include "checks/tensor.h"
#include "launch/chunks.h"

namespace liger::LIGER_BACKEND {

// Of the matmuls, of losses and statistics, and of the sum of dweight over chunks.
struct HeadDtypes {
  Dtype compute, acc, accum;
};
inline HeadDtypes head_dtypes(const char* op, const Tensor& x, const Tensor& weight, const std::optional<ScalarType>& accum_dtype,
                              const std::optional<ScalarType>& compute_dtype) {
  const Dtype promoted = promote(check_dtype(op, x, "x"), check_dtype(op, weight, "weight"));
  const Dtype compute = compute_dtype ? check_dtype(op, *compute_dtype, "compute_dtype", x) : promoted, acc = accumulator(compute);
  return {compute, acc, accum_dtype ? check_dtype(op, *accum_dtype, "accum_dtype", x) : acc};
}

inline HeadDtypes check_head(const char* op, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                             const std::optional<ScalarType>& accum_dtype, const std::optional<ScalarType>& compute_dtype) {
  check_defined(op, x, "x");
  require(x.dim() == 2, op, ": x has shape ", shape_text(x), ", expected (rows, hidden_size)");
  check_device(op, weight, "weight", x, "x");
  require(weight.dim() == 2 && weight.size(1) == x.size(1) && weight.size(0) > 0, op, ": weight has shape ", shape_text(weight),
          ", expected (vocab_size, ", x.size(1), ")");
  const HeadDtypes dtypes = head_dtypes(op, x, weight, accum_dtype, compute_dtype);
  require(dtypes.accum == dtypes.acc || dtypes.accum == dtypes.compute, op, ": accum_dtype is ", dtype_name(scalar_type(dtypes.accum)),
          ", expected ", dtype_name(scalar_type(dtypes.acc)), " or the dtype of the matmuls, ", dtype_name(scalar_type(dtypes.compute)));
  check_parameter(op, bias, "bias", weight.size(0), x, "x");
  return dtypes;
}

inline void check_schedule(const char* op, const Size& rows, const Size& vocab, int64_t gradients, const Size& chunk_rows,
                           const Size& chunk_classes, bool need_dx, bool need_dweight, bool need_dbias) {
  require(gradients >= 0 && gradients <= int64_t(launch::Gradients::recomputed), op, ": gradients is ", gradients,
          ", expected 0 (none), 1 (deferred), 2 (accumulated) or 3 (recomputed)");
  require(chunk_rows >= 1, op, ": chunk_rows is ", chunk_rows, ", expected at least 1");
  require(chunk_classes >= 1, op, ": chunk_classes is ", chunk_classes, ", expected at least 1");
  const auto way = launch::Gradients(gradients);
  require(way != launch::Gradients::deferred || (chunk_rows >= rows && chunk_classes >= vocab), op,
          ": gradients is 1 (deferred), for which all logits have to exist at a time, not ", chunk_rows, " of ", rows, " rows and ",
          chunk_classes, " of ", vocab, " classes");
  require((way == launch::Gradients::none) == !(need_dx || need_dweight || need_dbias), op, ": gradients is ", gradients,
          ", which does not fit need_dx ", need_dx, ", need_dweight ", need_dweight, " and need_dbias ", need_dbias);
}

// What the forward made for the backward.
inline void check_gradient_sums(const char* op, const Tensor& x, const Tensor& weight, const HeadDtypes& dtypes, int64_t gradients,
                                const Tensor& saved, const Tensor& dx, const Tensor& dweight, const Tensor& dbias, bool need_dx,
                                bool need_dweight, bool need_dbias) {
  const Size rows = x.size(0), hidden = x.size(1), vocab = weight.size(0);
  if (launch::Gradients(gradients) == launch::Gradients::deferred) {
    check_device(op, saved, "saved", x, "x");
    check_shape(op, saved, "saved", {rows, vocab});
    require(type_of(saved) == scalar_type(dtypes.compute), op, ": saved has dtype ", dtype_name(type_of(saved)), ", expected ",
            dtype_name(scalar_type(dtypes.compute)));
  }
  if (launch::Gradients(gradients) != launch::Gradients::accumulated) return;
  if (need_dx) check_made(op, dx, "dx", {rows, hidden}, dtypes.compute, x, "x");
  if (need_dweight) check_made(op, dweight, "dweight", {vocab, hidden}, dtypes.accum, x, "x");
  if (need_dbias) check_made(op, dbias, "dbias", {vocab}, dtypes.acc, x, "x");
}

}  // namespace liger::LIGER_BACKEND
