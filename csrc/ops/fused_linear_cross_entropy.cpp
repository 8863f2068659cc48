// The language-model head and its loss without the logits: chunks of rows go through one buffer. Per chunk: logits by a matmul,
// one in-place pass that leaves their gradient, then the gradients' matmuls. Nothing waits for the host: denominators and loss
// scale stay in device memory and multiply the results of the matmuls, so what is stored in 16 bits is never scaled by 1/N.
//
// Three ways to the gradients, chosen from the arguments alone (liger_ext/ops/fused_linear_cross_entropy.py says the same):
//   deferred     one chunk and dweight or dbias wanted: the gradient of the logits is saved and the backward runs the matmuls,
//                with alpha = grad_output * scale. No fp32 copy of dweight exists, and reduction "none" costs nothing extra.
//   accumulated  several chunks (or only dx wanted): the forward adds up unreduced dx, dweight, dbias; the backward scales.
//   recomputed   reduction "none", several chunks, dweight or dbias wanted: the backward runs the chunks again.
// With reduction "none" each row has its own grad_output. It never multiplies a gradient of logits, which 16 bits might not hold then: it
// multiplies the rows of dx when they are made, and for dweight those of x, relative to the largest of them.
#include "kernels/cross_entropy.h"

#include "checks/fused_linear_cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "launch/chunks.h"
#include "ops/loss.h"

namespace liger::LIGER_BACKEND {
namespace {

using launch::Gradients;

struct Wanted {
  bool dx, dweight, dbias;
};

// fp16 holds no gradient below 6e-8: the stored ones are multiplied by this, and the matmuls' alpha takes it out again.
double gradient_scale_of(Dtype compute) { return compute == Dtype::f16 ? 64.0 : 1.0; }

MutableRows row_range(const Tensor& t, int64_t first, int64_t stride, Dtype dtype) {
  return {static_cast<char*>(t.data_ptr()) + first * stride * size_of(dtype), stride, dtype};
}
Rows row_range(const RowsView& v, int64_t first) {
  if (v.view.data == nullptr) return v.view;  // rows without columns
  return {static_cast<const char*>(v.view.data) + first * v.view.stride * size_of(v.view.dtype), v.view.stride, v.view.dtype};
}
Rows readable(const MutableRows& r) { return {r.data, r.stride, r.dtype}; }
Matrix matrix(const Rows& r, bool transposed = false) { return {r.data, r.stride, r.dtype, transposed}; }

// Rows that a matmul can read: they neither overlap nor are one row over and over.
RowsView as_matrix(const char* op, const Tensor& t, const char* name) {
  const RowsView view = as_rows(op, t, name);
  return view.rows <= 1 || view.view.stride >= view.cols ? view : as_rows(op, contiguous(op, t), name);
}

// A checked call: operands in the compute dtype.
class Problem {
 public:
  Problem(const Scope& scope, const Tensor& x, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
          const OptionalTensor& ce_weight, const CrossEntropyOptions& options, std::optional<ScalarType> accum_dtype,
          std::optional<ScalarType> compute_dtype, int64_t chunk_rows, Wanted wanted)
      : scope(scope), options(options), wanted(wanted) {
    const char* op = scope.op();
    rows = x.size(0);
    hidden = x.size(1);
    vocab = weight.size(0);
    const LossDtypes dtypes = loss_dtypes(x, weight, accum_dtype, compute_dtype);
    compute = dtypes.compute;
    acc = dtypes.accumulator;
    accum = dtypes.sum;
    this->target = contiguous(op, target);
    this->ce_weight = contiguous(op, ce_weight);
    this->bias = contiguous(op, bias);
    this->wanted.dbias = wanted.dbias && bias.has_value();
    chunk = launch::equal_chunks(rows, std::abs(chunk_rows));
    mode = launch::gradients_of(wanted.dx, wanted.dweight || this->wanted.dbias, rows, chunk_rows, options.reduction == Reduction::none);
    x_ = as_matrix(op, x, "x");
    weight_ = as_matrix(op, weight, "weight");
    gradient_scale = gradient_scale_of(compute);
  }

  // The operands in the compute dtype; cast at the first use, since a backward may need neither.
  const RowsView& x_rows() const { return in_compute_dtype(x_, "x"); }
  const RowsView& weight_rows() const { return in_compute_dtype(weight_, "weight"); }

  // One chunk: logits into `buffer`, then its losses (`losses`, or nullptr) and, in place, its unreduced gradient.
  void run_chunk(int64_t first, int64_t count, const MutableRows& buffer, const Tensor& counts, const LossRows* losses,
                 bool gradient) const {
    if (bias) fill_rows({count, vocab, buffer, vector_of(bias, "bias")}, scope);
    gemm({count, vocab, hidden, matrix(row_range(x_rows(), first)), matrix(weight_rows(), true), buffer.data, buffer.stride, compute,
          nullptr, bias.has_value()},
         scope);
    CrossEntropyRows args{};
    args.rows = count;
    args.vocab = vocab;
    args.first_row = first;
    args.logits = readable(buffer);
    args.target = static_cast<const int64_t*>(target.data_ptr()) + first;
    args.class_weight = vector_of(ce_weight, "ce_weight");
    args.counts = counts.data_ptr();
    args.options = options;
    args.op = "fused_linear_cross_entropy";
    if (losses != nullptr) losses->point(args, first);
    if (gradient) cross_entropy_in_place({args, buffer, gradient_scale, rows}, scope);
    else cross_entropy_forward(args, scope);
  }

  // dx[first .. first + count) = alpha * G @ W
  void input_gradient(int64_t first, int64_t count, const Rows& gradient, const Tensor& dx, Dtype dx_dtype, const void* alpha) const {
    gemm({count, hidden, vocab, matrix(gradient), matrix(weight_rows()), row_range(dx, first, hidden, dx_dtype).data, hidden, dx_dtype,
          alpha, false},
         scope);
  }
  // dweight (+)= alpha * G^T @ x
  void weight_gradient(int64_t count, const Rows& gradient, const Rows& x_chunk, const Tensor& dweight, Dtype dtype, const void* alpha,
                       bool accumulate) const {
    gemm({vocab, hidden, count, matrix(gradient, true), matrix(x_chunk), dweight.data_ptr(), hidden, dtype, alpha, accumulate}, scope);
  }
  // dbias (+)= column sums of G
  void bias_gradient(int64_t count, const Rows& gradient, const Rows& row_scale, const Tensor& dbias, bool accumulate) const {
    ColumnSum args{count, vocab, gradient, row_scale, dbias.data_ptr(), accumulate, nullptr};
    const Tensor space = workspace(scope, column_sum_workspace(args, scope), target);
    args.workspace = space.data_ptr();
    column_sum(args, scope);
  }

  // A chunk's share of the wanted gradients, without scale. row_scale: of the rows of dbias, or none.
  void accumulate_gradients(int64_t first, int64_t count, const Rows& gradient, const Rows& x_chunk, const Rows& row_scale,
                            const Tensor& dx, const Tensor& dweight, const Tensor& dbias) const {
    if (wanted.dx) input_gradient(first, count, gradient, dx, compute, nullptr);
    if (wanted.dweight) weight_gradient(count, gradient, x_chunk, dweight, accum, nullptr, first > 0);
    if (wanted.dbias) bias_gradient(count, gradient, row_scale, dbias, first > 0);
  }

  // May a matmul of the compute dtype write this dtype?
  bool writes(Dtype dtype) const { return dtype == compute || dtype == acc; }

  const Scope& scope;
  CrossEntropyOptions options;
  Wanted wanted;
  int64_t rows = 0, hidden = 0, vocab = 0, chunk = 0;
  Dtype compute{}, acc{}, accum{};
  Tensor target;
  OptionalTensor bias, ce_weight;
  Gradients mode{};
  double gradient_scale = 1;

 private:
  const RowsView& in_compute_dtype(RowsView& operand, const char* name) const {
    if (operand.view.dtype != compute) {
      const Tensor copy = allocate_like(scope, operand.tensor, compute);
      const MutableRows out = mutable_rows(copy, name);
      if (copy.numel() > 0) scale_cast({operand.rows, operand.cols, operand, out, nullptr, {}}, scope);
      operand = {copy, operand.rows, operand.cols, readable(out)};
    }
    return operand;
  }

  mutable RowsView x_, weight_;
};

using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

ForwardResult forward_op(Tensor x, Tensor weight, Tensor target, OptionalTensor bias, OptionalTensor ce_weight, OptionalTensor normalizer,
                         int64_t ignore_index, int64_t reduction, double label_smoothing, double lse_square_scale,
                         std::optional<double> softcap, bool use_token_scaling, bool return_z_loss, bool return_token_accuracy,
                         bool return_predicted_tokens, std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype,
                         int64_t chunk_rows, bool need_dx, bool need_dweight, bool need_dbias) {
  const Scope scope("fused_linear_cross_entropy", x);
  const CrossEntropyOptions options{ignore_index,        label_smoothing,   lse_square_scale,
                                    softcap.value_or(0), use_token_scaling, Reduction(reduction)};
  const Problem p(scope, x, weight, target, bias, ce_weight, options, accum_dtype, compute_dtype, chunk_rows,
                  {need_dx, need_dweight, need_dbias});

  const Counts made = counts_of(scope, p.target, p.ce_weight, get(normalizer), p.vocab, options, p.acc);
  cross_entropy_counts(made.how, scope);
  const Tensor& counts = made.values;
  LossRows losses(scope, x, p.rows, p.acc, options, return_z_loss, return_token_accuracy, return_predicted_tokens);
  const bool accumulated = p.mode == Gradients::accumulated, deferred = p.mode == Gradients::deferred;
  const auto output = [&](bool wanted, std::vector<int64_t> sizes, Dtype dtype) {
    return allocate(scope, wanted ? sizes : std::vector<int64_t>{0}, dtype, x);
  };
  Tensor saved =
      deferred ? allocate(scope, {p.rows, p.vocab}, {launch::padded_vocab(p.vocab), 1}, p.compute, x) : output(false, {}, p.compute);
  Tensor dx = output(accumulated && p.wanted.dx, {p.rows, p.hidden}, p.compute);
  Tensor dweight = output(accumulated && p.wanted.dweight, {p.vocab, p.hidden}, p.accum);
  Tensor dbias = output(accumulated && p.wanted.dbias, {p.vocab}, p.acc);

  if (p.rows > 0) {
    const Tensor buffer = deferred ? saved : allocate(scope, {p.chunk, launch::padded_vocab(p.vocab)}, p.compute, x);
    const MutableRows logits = row_range(buffer, 0, launch::padded_vocab(p.vocab), p.compute);
    for (int64_t first = 0; first < p.rows; first += p.chunk) {
      const int64_t count = std::min(p.chunk, p.rows - first);
      p.run_chunk(first, count, logits, counts, &losses, deferred || accumulated);
      if (!accumulated) continue;
      const Rows x_chunk = p.wanted.dweight ? row_range(p.x_rows(), first) : Rows{};
      p.accumulate_gradients(first, count, readable(logits), x_chunk, {}, dx, dweight, dbias);
    }
  } else {
    for (Tensor* t : {&dweight, &dbias}) torch::stable::zero_(*t);
  }
  losses.finish(made, true);
  return {losses.loss, losses.z_loss, losses.token_accuracy, losses.predicted_tokens, counts, saved, dx, dweight, dbias};
}

// The results in their parameters' dtypes, and how each mode writes them.
class Backward {
 public:
  Backward(const Problem& p, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& dloss, const Tensor& counts)
      : p_(p), counts_(counts), per_row_(p.options.reduction == Reduction::none) {
    const auto output = [&](bool wanted, const std::vector<int64_t>& sizes, ScalarType type) {
      return allocate(p.scope, wanted ? sizes : std::vector<int64_t>{0}, type, x);
    };
    dx = output(p.wanted.dx, {p.rows, p.hidden}, type_of(x));
    dweight = output(p.wanted.dweight, {p.vocab, p.hidden}, type_of(weight));
    dbias = output(p.wanted.dbias, {p.vocab}, bias ? type_of(*bias) : scalar_type(p.acc));

    dloss_ = contiguous(p.scope.op(), dloss);
    if (per_row_) row_grad_ = {dloss_.data_ptr(), 1, dtype_of(dloss_, "dloss")};
    // alpha = [grad_output *] scale / gradient_scale: one number in device memory, the scale of every result. Per row, two more.
    scales_ = allocate(p.scope, {per_row_ ? 3 : 1}, p.acc, x);
    const Vector grad = per_row_ ? Vector{} : Vector{dloss_.data_ptr(), dtype_of(dloss_, "dloss")};
    const void* scale = static_cast<const char*>(counts_.data_ptr()) + CrossEntropyCounts::scale * size_of(p.acc);
    scalar_product({grad, scale, 1 / p.gradient_scale, p.acc, scales_.data_ptr(), row_grad_, p.rows}, p.scope);
  }

  void from_saved_gradient(const Tensor& saved) {
    const RowsView rows = as_matrix(p_.scope.op(), saved, "saved");
    const Rows gradient = rows;
    if (p_.wanted.dx) {
      // Rows that are still to be scaled stay in the matmuls' dtype: a narrower one would round them twice.
      const bool apart = per_row_ && dtype_of(dx, "x") != p_.compute;
      const Tensor made = apart ? allocate(p_.scope, {p_.rows, p_.hidden}, p_.compute, counts_) : dx;
      into(made, [&](const Tensor& out, Dtype dtype) { p_.input_gradient(0, p_.rows, gradient, out, dtype, alpha()); });
      if (per_row_)
        scale_cast({p_.rows, p_.hidden, readable(mutable_rows(made, "x")), mutable_rows(dx, "x"), nullptr, row_grad_}, p_.scope);
    }
    if (p_.wanted.dweight) {
      const Tensor scaled = scaled_x_buffer(p_.rows);
      const Rows x = per_row_ ? scaled_x(0, p_.rows, scaled) : p_.x_rows();
      into(dweight, [&](const Tensor& out, Dtype dtype) { p_.weight_gradient(p_.rows, gradient, x, out, dtype, dweight_alpha(), false); });
    }
    if (p_.wanted.dbias) {
      const Tensor sum = allocate(p_.scope, {p_.vocab}, p_.acc, counts_);
      p_.bias_gradient(p_.rows, gradient, row_grad_, sum, false);
      scale(sum, dbias, alpha(), {});
    }
  }

  void from_accumulated(const Tensor& dx_sum, const Tensor& dweight_sum, const Tensor& dbias_sum) {
    if (p_.wanted.dx) scale(dx_sum, dx, alpha(), row_grad_);
    if (p_.wanted.dweight) scale(dweight_sum, dweight, dweight_alpha(), {});
    if (p_.wanted.dbias) scale(dbias_sum, dbias, alpha(), {});
  }

  void by_recomputing() {
    const Tensor buffer = allocate(p_.scope, {p_.chunk, launch::padded_vocab(p_.vocab)}, p_.compute, counts_);
    const MutableRows gradient = row_range(buffer, 0, launch::padded_vocab(p_.vocab), p_.compute);
    Tensor dweight_sum, dbias_sum, dx_sum;
    if (p_.wanted.dx) dx_sum = allocate(p_.scope, {p_.rows, p_.hidden}, p_.compute, counts_);
    if (p_.wanted.dweight) dweight_sum = allocate(p_.scope, {p_.vocab, p_.hidden}, p_.accum, counts_);
    if (p_.wanted.dbias) dbias_sum = allocate(p_.scope, {p_.vocab}, p_.acc, counts_);
    const Tensor scaled = scaled_x_buffer(p_.chunk);
    for (int64_t first = 0; first < p_.rows; first += p_.chunk) {
      const int64_t count = std::min(p_.chunk, p_.rows - first);
      p_.run_chunk(first, count, gradient, counts_, nullptr, true);
      const Rows x = p_.wanted.dweight ? scaled_x(first, count, scaled) : Rows{};
      p_.accumulate_gradients(first, count, readable(gradient), x, row_grad_from(first), dx_sum, dweight_sum, dbias_sum);
    }
    from_accumulated(dx_sum, dweight_sum, dbias_sum);
  }

  Tensor dx, dweight, dbias;

 private:
  // Of every result; of dweight, where x is scaled for it; what x is scaled by.
  const void* alpha() const { return scales_.data_ptr(); }
  const void* dweight_alpha() const { return per_row_ ? scale_at(1) : alpha(); }
  const void* x_scale() const { return scale_at(2); }
  const void* scale_at(int64_t i) const { return static_cast<const char*>(scales_.data_ptr()) + i * size_of(p_.acc); }

  Rows row_grad_from(int64_t first) const {
    return {static_cast<const char*>(row_grad_.data) + first * size_of(row_grad_.dtype), 1, row_grad_.dtype};
  }
  Tensor scaled_x_buffer(int64_t rows) const {
    return allocate(p_.scope, {per_row_ && p_.wanted.dweight ? rows : 0, p_.hidden}, p_.compute, counts_);
  }
  // Rows of x times their grad_output, relative to the largest grad_output of all.
  Rows scaled_x(int64_t first, int64_t count, const Tensor& buffer) const {
    const MutableRows out = mutable_rows(buffer, "x");
    scale_cast({count, p_.hidden, row_range(p_.x_rows(), first), out, x_scale(), row_grad_from(first)}, p_.scope);
    return readable(out);
  }

  // out = in * factor [* each row's grad_output]
  void scale(const Tensor& in, const Tensor& out, const void* factor, const Rows& row_grad) const {
    if (out.numel() == 0) return;
    const int64_t cols = out.size(out.dim() - 1), rows = out.numel() / cols;
    scale_cast({rows, cols, readable(mutable_rows(in, "gradient")), mutable_rows(out, "gradient"), factor, row_grad}, p_.scope);
  }

  // Runs a matmul into `out`, by way of the accumulator dtype where a matmul cannot write out's.
  template <class F> void into(const Tensor& out, F matmul) const {
    const Dtype dtype = dtype_of(out, "gradient");
    if (p_.writes(dtype)) return matmul(out, dtype);
    const Tensor wide = allocate_like(p_.scope, out, p_.acc);
    matmul(wide, p_.acc);
    scale_cast({out.size(0), out.size(1), readable(mutable_rows(wide, "gradient")), mutable_rows(out, "gradient"), nullptr, {}}, p_.scope);
  }

  const Problem& p_;
  Tensor counts_, dloss_, scales_;
  Rows row_grad_;
  bool per_row_;
};

std::tuple<Tensor, Tensor, Tensor> backward_op(Tensor dloss, Tensor x, Tensor weight, Tensor target, OptionalTensor bias,
                                               OptionalTensor ce_weight, Tensor counts, Tensor saved, Tensor dx, Tensor dweight,
                                               Tensor dbias, int64_t ignore_index, int64_t reduction, double label_smoothing,
                                               double lse_square_scale, std::optional<double> softcap, bool use_token_scaling,
                                               std::optional<ScalarType> accum_dtype, std::optional<ScalarType> compute_dtype,
                                               int64_t chunk_rows, bool need_dx, bool need_dweight, bool need_dbias) {
  const Scope scope("fused_linear_cross_entropy_backward", x);
  const CrossEntropyOptions options{ignore_index,        label_smoothing,   lse_square_scale,
                                    softcap.value_or(0), use_token_scaling, Reduction(reduction)};
  const Problem p(scope, x, weight, target, bias, ce_weight, options, accum_dtype, compute_dtype, chunk_rows,
                  {need_dx, need_dweight, need_dbias});
  Backward backward(p, x, weight, bias, dloss, counts);
  if (p.rows == 0) {
    for (Tensor* t : {&backward.dweight, &backward.dbias}) torch::stable::zero_(*t);
    return {backward.dx, backward.dweight, backward.dbias};
  }
  switch (p.mode) {
    case Gradients::none:
      break;
    case Gradients::deferred:
      backward.from_saved_gradient(saved);
      break;
    case Gradients::accumulated:
      backward.from_accumulated(dx, dweight, dbias);
      break;
    case Gradients::recomputed:
      backward.by_recomputing();
      break;
  }
  return {backward.dx, backward.dweight, backward.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger_ext, LIGER_DISPATCH_KEY, m) {
  m.impl("fused_linear_cross_entropy", boxed<forward_op, check_fused_linear_cross_entropy>);
  m.impl("fused_linear_cross_entropy_backward", boxed<backward_op, check_fused_linear_cross_entropy_backward>);
}

}  // namespace liger::LIGER_BACKEND
