// The tensors that the backwards of rms_norm, add_rms_norm, layer_norm and group_norm return (NormGradients), and the computation that the
// first three share (norm_gradients).
#pragma once
#include "kernels/norms.h"
#include "ops/tensor.h"

namespace liger::LIGER_BACKEND {

// The results of a backward. A gradient is empty if it is not requested, or if its parameter is absent.
struct NormGradients {
  Tensor dx, dweight, dbias;
  bool wanted;

  NormGradients(const Scope& scope, const Tensor& x, const OptionalTensor& weight, const std::optional<ScalarType>& bias_dtype,
                int64_t channels, bool need_dx, bool need_dweight, bool need_dbias) {
    need_dweight = need_dweight && weight;
    need_dbias = need_dbias && bias_dtype;
    wanted = need_dx || need_dweight || need_dbias;
    dx = allocate(scope, need_dx ? tensor_sizes(x) : std::vector<int64_t>{0}, tensor_type(x), x);
    dweight = allocate(scope, {need_dweight ? channels : 0}, tensor_type(weight ? *weight : x), x);
    dbias = allocate(scope, {need_dbias ? channels : 0}, bias_dtype.value_or(tensor_type(x)), x);
  }

  // Returns whether there is nothing to compute. Without elements, dweight and dbias become 0.
  bool complete(const Tensor& x) const {
    if (x.numel() == 0) zero({dweight, dbias});
    return !wanted || x.numel() == 0;
  }
};

// Computes the gradients of a norm over rows. z: the rows that the forward normalised.
template <bool Centered>
void norm_gradients(const Scope& scope, const Tensor& dy, const OptionalTensor& dsum, const Tensor& z,
                    const OptionalTensor& weight_argument, const OptionalTensor& mean_argument, const Tensor& rstd_argument, double offset,
                    const NormGradients& out) {
  const RowsView dy_rows = as_rows(scope, dy), dsum_rows = dsum ? as_rows(scope, *dsum) : RowsView{}, rows = as_rows(scope, z);
  const OptionalTensor weight = contiguous(scope, weight_argument), mean = contiguous(scope, mean_argument);
  const Tensor rstd = contiguous(scope, rstd_argument);
  NormBackward<Centered> args{.rows = rows.rows,
                              .cols = rows.cols,
                              .dy = dy_rows,
                              .dsum = dsum_rows,
                              .z = rows,
                              .weight = as_vector(weight),
                              .mean = mean ? mean->data_ptr() : nullptr,
                              .rstd = rstd.data_ptr(),
                              .dz = out.dx.numel() > 0 ? mutable_rows(out.dx) : MutableRows{},
                              .dweight = mutable_vector(out.dweight),
                              .dbias = mutable_vector(out.dbias),
                              .offset = offset};
  const Tensor space = workspace(scope, norm_backward_workspace(args, scope), z);
  args.workspace = space.data_ptr();
  norm_backward(args, scope);
}

}  // namespace liger::LIGER_BACKEND
