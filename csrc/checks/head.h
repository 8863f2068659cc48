// Checks the arguments of the ops with a language-model head (ops/head.h), and computes the sizes of the tensors that these ops save for
// their backward (ops/fused_linear.h).
#pragma once
#include "checks/tensor.h"
#include "launch/chunks.h"

namespace liger::LIGER_BACKEND {

// The dtypes of the matmuls, of losses and statistics, of the sum of dweight over chunks, and of logits.
struct HeadDtypes {
  Dtype compute, acc, accum, logits;

  bool wide_logits() const { return logits != compute; }
};
inline HeadDtypes head_dtypes(const char* op, const Tensor& x, const Tensor& weight, const std::optional<ScalarType>& accum_dtype,
                              const std::optional<ScalarType>& compute_dtype, const std::optional<ScalarType>& logits_dtype) {
  const Dtype promoted = promote(check_dtype(op, x, "x"), check_dtype(op, weight, "weight"));
  const Dtype compute = compute_dtype ? check_dtype(op, *compute_dtype, "compute_dtype", x) : promoted, acc = accumulator(compute);
  return {compute, acc, accum_dtype ? check_dtype(op, *accum_dtype, "accum_dtype", x) : acc,
          logits_dtype ? check_dtype(op, *logits_dtype, "logits_dtype", x) : compute};
}

inline HeadDtypes check_head(const char* op, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                             const std::optional<ScalarType>& accum_dtype, const std::optional<ScalarType>& compute_dtype,
                             const std::optional<ScalarType>& logits_dtype) {
  check_defined(op, x, "x");
  require(x.dim() == 2, op, ": x has shape ", shape_text(x), ", expected (rows, hidden_size)");
  check_device(op, weight, "weight", x, "x");
  require(weight.dim() == 2 && weight.size(1) == x.size(1) && weight.size(0) > 0, op, ": weight has shape ", shape_text(weight),
          ", expected (vocab_size, ", x.size(1), ")");
  const HeadDtypes dtypes = head_dtypes(op, x, weight, accum_dtype, compute_dtype, logits_dtype);
  require(dtypes.accum == dtypes.acc || dtypes.accum == dtypes.compute, op, ": accum_dtype is ", dtype_name(scalar_type(dtypes.accum)),
          ", expected ", dtype_name(scalar_type(dtypes.acc)), " or the dtype of the matmuls, ", dtype_name(scalar_type(dtypes.compute)));
  require(dtypes.logits == dtypes.acc || dtypes.logits == dtypes.compute, op, ": logits_dtype is ", dtype_name(scalar_type(dtypes.logits)),
          ", expected ", dtype_name(scalar_type(dtypes.acc)), " or the dtype of the matmuls, ", dtype_name(scalar_type(dtypes.compute)));
  require(dtype_bytes(dtypes.acc) >= dtype_bytes(tensor_dtype(weight, "weight")), op, ": compute_dtype is ",
          dtype_name(scalar_type(dtypes.compute)), ", expected float64 for a weight of float64");
  check_parameter(op, bias, "bias", weight.size(0), x, "x");
  return dtypes;
}

// The sum of dweight over chunks. Its first rows lie in dweight's memory, the others in a further tensor, `rest`. Unless all rows are first
// rows, their number is a multiple of 64, so that matmuls begin aligned. A 16-bit sum has dweight's dtype, so that it is not rounded again.
inline Dtype sum_dtype(const HeadDtypes& dtypes, Dtype weight) { return dtypes.accum == weight ? weight : dtypes.acc; }
template <class Size> struct SumSizes {
  Size rows, memory, rest;  // rows of the sum in dweight's memory; elements, of the sum's dtype, of dweight's memory and the rest

  SumSizes(const Size& vocab, const Size& hidden, Dtype sum, Dtype weight)
      : rows(sum == weight ? vocab : vocab / ratio(sum, weight) / Size(64) * Size(64)),
        memory((vocab * hidden + ratio(sum, weight) - Size(1)) / ratio(sum, weight)),
        rest((vocab - rows) * hidden) {}
  static Size ratio(Dtype sum, Dtype weight) { return Size(int64_t(dtype_bytes(sum) / dtype_bytes(weight))); }
};

// The room of a class in dweight's memory, in elements of the gradient of logits (launch/chunks.h).
template <class Size> Size overlaid_room(const Size& hidden, Dtype weight, Dtype compute) {
  return hidden * Size(int64_t(dtype_bytes(weight) / dtype_bytes(compute)));
}

// Returns whether the forward sums dx. It does if chunks of rows are accumulated. It also does if the gradient of the logits is stored and
// the matmuls read a converted copy of the weight: to compute dx, the backward would convert the weight again. stored: whether the gradient
// of all logits is stored.
inline bool sums_dx(launch::Gradients gradients, Dtype weight, Dtype compute, bool stored) {
  using launch::Gradients;
  const bool keeps_gradient = gradients == Gradients::deferred || (gradients == Gradients::overlaid && stored);
  return gradients == Gradients::accumulated || (keeps_gradient && weight != compute);
}

inline void check_overlaid(const char* op, const Tensor& x, const Tensor& weight, const HeadDtypes& dtypes, const Size& chunk_rows,
                           const Size& chunk_classes, bool need_dweight) {
  const Size rows = x.size(0), hidden = x.size(1), vocab = weight.size(0);
  const Dtype weight_dtype = tensor_dtype(weight, "weight");
  require(need_dweight && (weight_dtype == dtypes.compute || weight_dtype == dtypes.acc), op,
          ": gradients is 4 (overlaid), expected need_dweight and a weight in the dtype of the matmuls or of their sums");
  require(hidden >= 1 && rows >= 1 && (dtypes.wide_logits() || chunk_rows >= rows), op,
          ": gradients is 4 (overlaid), expected an x that is not empty and has at most ", chunk_rows, " rows (chunk_rows); its shape is ",
          shape_text(x));
  if (chunk_classes >= vocab) return;
  const Size room = overlaid_room(hidden, weight_dtype, dtypes.compute), inside = launch::overlaid_classes(rows, room, vocab);
  require(chunk_classes % Size(64) == Size(0) && chunk_classes >= inside && vocab * room >= rows * Size(64), op,
          ": gradients is 4 (overlaid) and chunk_classes ", chunk_classes, ", expected a multiple of 64, at least ", inside,
          ", the classes whose gradients dweight's memory holds, and a dweight that holds the gradients of 64 classes");
}

inline void check_schedule(const char* op, const Tensor& x, const Tensor& weight, const HeadDtypes& dtypes, int64_t gradients,
                           const Size& chunk_rows, const Size& chunk_classes, bool need_dx, bool need_dweight, bool need_dbias) {
  const Size rows = x.size(0), vocab = weight.size(0);
  require(gradients >= 0 && gradients <= int64_t(launch::Gradients::overlaid), op, ": gradients is ", gradients,
          ", expected 0 (none), 1 (deferred), 2 (accumulated), 3 (recomputed) or 4 (overlaid)");
  require(chunk_rows >= 1, op, ": chunk_rows is ", chunk_rows, ", expected at least 1");
  const auto strategy = launch::Gradients(gradients);
  const bool overlaid = strategy == launch::Gradients::overlaid;
  require(chunk_classes >= (overlaid ? 0 : 1), op, ": chunk_classes is ", chunk_classes, ", expected at least 1");
  // Wide logits (fp32 logits of 16-bit operands) exist for a chunk of rows at a time, beside the stored gradient of all logits.
  require(strategy != launch::Gradients::deferred || ((dtypes.wide_logits() || chunk_rows >= rows) && chunk_classes >= vocab), op,
          ": gradients is 1 (deferred), for which all logits have to exist at a time, not ", chunk_rows, " of ", rows, " rows and ",
          chunk_classes, " of ", vocab, " classes");
  if (overlaid) check_overlaid(op, x, weight, dtypes, chunk_rows, chunk_classes, need_dweight);
  require((strategy == launch::Gradients::none) == !(need_dx || need_dweight || need_dbias), op, ": gradients is ", gradients,
          ", which does not fit need_dx ", need_dx, ", need_dweight ", need_dweight, " and need_dbias ", need_dbias);
}

}  // namespace liger::LIGER_BACKEND
