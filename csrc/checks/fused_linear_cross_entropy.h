// Checks of the arguments of fused_linear_cross_entropy and of its two backwards.
#pragma once
#include "checks/cross_entropy.h"
#include "checks/head.h"

namespace liger::LIGER_BACKEND {

// The arguments of the three ops. The backwards alone have `mix`, from the gradient of the entropy (kernels/cross_entropy.h), and results
// of the forward.
struct FusedLoss : LossArguments {
  Tensor x, weight;
  OptionalTensor bias, ce_weight, normalizer, temperature, mix;
  std::optional<ScalarType> accum_dtype, compute_dtype, logits_dtype;
  int64_t gradients = 0;
  Size chunk_rows = 1, chunk_classes = 1;
  bool need_dx = false, need_dweight = false, need_dbias = false;
  Tensor saved, dx, dweight, dbias;

  using F = FusedLoss;
  static constexpr auto members = std::tuple_cat(LossArguments::members, std::tuple{Member{"x", &F::x},
                                                                                    Member{"weight", &F::weight},
                                                                                    Member{"bias", &F::bias},
                                                                                    Member{"ce_weight", &F::ce_weight},
                                                                                    Member{"normalizer", &F::normalizer},
                                                                                    Member{"temperature", &F::temperature},
                                                                                    Member{"mix", &F::mix},
                                                                                    Member{"accum_dtype", &F::accum_dtype},
                                                                                    Member{"compute_dtype", &F::compute_dtype},
                                                                                    Member{"logits_dtype", &F::logits_dtype},
                                                                                    Member{"gradients", &F::gradients},
                                                                                    Member{"chunk_rows", &F::chunk_rows},
                                                                                    Member{"chunk_classes", &F::chunk_classes},
                                                                                    Member{"need_dx", &F::need_dx},
                                                                                    Member{"need_dweight", &F::need_dweight},
                                                                                    Member{"need_dbias", &F::need_dbias},
                                                                                    Member{"saved", &F::saved},
                                                                                    Member{"dx", &F::dx},
                                                                                    Member{"dweight", &F::dweight},
                                                                                    Member{"dbias", &F::dbias}});

  bool wants_dbias() const { return need_dbias && bias.has_value(); }
};

// Checks the arguments that only a call for log-probabilities of tokens (linear_log_probs) may have.
inline void check_log_probs(const char* op, const FusedLoss& a, Dtype accumulator) {
  require(a.logit_scale > 0 && a.logit_scale < 1e18, op, ": logit_scale is ", a.logit_scale, ", expected a number above 0, below 1e18");
  const Size rows = a.x.size(0);
  if (a.temperature) check_forward_result(op, *a.temperature, "temperature", {rows}, accumulator, a.x, "x");
  if (a.mix) check_forward_result(op, *a.mix, "mix", {rows, Size(4)}, accumulator, a.x, "x");
  const bool wanted = a.temperature || a.mix || a.logit_scale != 1 || a.wants_moments();
  const bool plain = a.label_smoothing == 0 && a.lse_square_scale == 0 && !a.use_token_scaling && !a.ce_weight;
  require(!wanted || (Reduction(a.reduction) == Reduction::none && plain), op,
          ": temperature, logit_scale, mix and return_entropy, _mean_logits, _log_sum_sq need reduction 0 (none), no label_smoothing, no"
          " lse_square_scale, no use_token_scaling and no ce_weight");
}
// Returns whether the forward saves each row's log-sum-exp for the backward.
inline bool keeps_lse(const FusedLoss& a, const Size& stored, const Size& vocab) {
  return a.return_entropy || (launch::Gradients(a.gradients) == launch::Gradients::overlaid && stored < vocab);
}

// The tensors that the forward saves for the backward. One that the strategy does not use has no elements, and its `sizes` are empty here.
struct SavedTensor {
  std::vector<Size> sizes;
  Dtype dtype;
  std::vector<Size> shape() const { return sizes.empty() ? std::vector<Size>{0} : sizes; }
};
struct SavedTensors {
  SavedTensor counts, saved, dx, dweight, dbias;
};
inline SavedTensors saved_tensors(const FusedLoss& a, const HeadDtypes& dtypes) {
  using launch::Gradients;
  const auto strategy = Gradients(a.gradients);
  const Size rows = a.x.size(0), hidden = a.x.size(1), vocab = a.weight.size(0);
  const bool all_stored = a.chunk_classes >= vocab;
  const Size stored = all_stored ? vocab : a.chunk_classes;
  const Dtype weight = tensor_dtype(a.weight, "weight"), sum = sum_dtype(dtypes, weight);
  const Size state_size = keeps_lse(a, stored, vocab) ? launch::gradient_state_size(rows, a.use_token_scaling) : Size(0);
  SavedTensors found{
      {{Size(int64_t(CrossEntropyCounts::slots)) + state_size}, dtypes.acc}, {{}, sum}, {{}, dtypes.compute}, {{}, sum}, {{}, dtypes.acc}};
  if (a.need_dx && sums_dx(strategy, weight, dtypes.compute, all_stored)) found.dx.sizes = {rows, hidden};
  if (a.wants_dbias() && strategy == Gradients::accumulated) found.dbias.sizes = {vocab};
  if (strategy == Gradients::deferred) {
    found.saved = {{rows, (vocab + Size(63)) / Size(64) * Size(64)}, dtypes.compute};
  } else if (strategy == Gradients::overlaid) {
    found.saved = {{launch::overlaid_rest(rows, overlaid_room(hidden, weight, dtypes.compute), vocab, stored)}, dtypes.compute};
    found.dweight = {{vocab * hidden}, weight};
  } else if (strategy == Gradients::accumulated && a.need_dweight) {
    const SumSizes<Size> sizes(vocab, hidden, sum, weight);
    found.saved.sizes = {sizes.rest};
    found.dweight.sizes = {sizes.memory};
  }
  return found;
}

inline HeadDtypes check_fused_loss(const char* op, const FusedLoss& a) {
  check_loss_options(op, a);
  const HeadDtypes dtypes = check_head(op, a.x, a.weight, a.bias, a.accum_dtype, a.compute_dtype, a.logits_dtype);
  check_targets(op, a.target, a.ce_weight, "ce_weight", a.x.size(0), a.weight.size(0), dtypes.acc, a.x, "x");
  check_log_probs(op, a, dtypes.acc);
  check_schedule(op, a.x, a.weight, dtypes, a.gradients, a.chunk_rows, a.chunk_classes, a.need_dx, a.need_dweight, a.wants_dbias());
  require(!(a.use_token_scaling && dtypes.wide_logits() && keeps_lse(a, a.chunk_classes, a.weight.size(0))), op,
          ": gradients is 4 (overlaid) for ", a.chunk_classes, " of ", a.weight.size(0), " classes, for which use_token_scaling needs",
          " logits_dtype None");
  return dtypes;
}

inline void check_fused_linear_cross_entropy(const FusedLoss& a) {
  const char* op = "fused_linear_cross_entropy";
  const HeadDtypes dtypes = check_fused_loss(op, a);
  if (!a.normalizer) return;
  check_device(op, *a.normalizer, "normalizer", a.x, "x");
  require(a.normalizer->numel() == 1 && tensor_type(*a.normalizer) == scalar_type(dtypes.acc), op,
          ": normalizer has another size or dtype, expected one number of dtype ", dtype_name(scalar_type(dtypes.acc)));
}

inline void check_fused_loss_gradients(const char* op, const FusedLoss& a) {
  const HeadDtypes dtypes = check_fused_loss(op, a);
  check_loss_gradient(op, a.dloss, a.reduction, a.x.size(0), a.x, "x");
  const SavedTensors expected = saved_tensors(a, dtypes);
  const auto check = [&](const Tensor& t, const char* name, const SavedTensor& e) {
    if (!e.sizes.empty()) check_forward_result(op, t, name, e.sizes, e.dtype, a.x, "x");
  };
  check(a.counts, "counts", expected.counts);
  check(a.dx, "dx", expected.dx);
  check(a.dbias, "dbias", expected.dbias);
  check(a.saved, "saved", expected.saved);
  check(a.dweight, "dweight", expected.dweight);
}

inline void check_fused_linear_cross_entropy_backward(const FusedLoss& a) {
  const char* op = "fused_linear_cross_entropy_backward";
  check_fused_loss_gradients(op, a);
  require(!a.mix || launch::Gradients(a.gradients) == launch::Gradients::recomputed, op, ": gradients is ", a.gradients,
          ", expected 3 (recomputed), since there is a gradient of the entropy (mix)");
}

// The op overwrites dweight, a result of the forward, by the gradient; it may overwrite saved.
inline void check_fused_linear_cross_entropy_backward_in_place(const FusedLoss& a) {
  const char* op = "fused_linear_cross_entropy_backward_";
  check_fused_loss_gradients(op, a);
  const auto strategy = launch::Gradients(a.gradients);
  require((strategy == launch::Gradients::accumulated || strategy == launch::Gradients::overlaid) && a.need_dweight, op, ": gradients is ",
          a.gradients, " and need_dweight ", a.need_dweight,
          ", expected 2 (accumulated) or 4 (overlaid), and true: only these compute dweight in place");
  require(!a.mix || (strategy == launch::Gradients::overlaid && !a.softcap), op, ": gradients is ", a.gradients,
          ", expected 4 (overlaid) and no softcap, since there is a gradient of the entropy (mix)");
}

}  // namespace liger::LIGER_BACKEND
