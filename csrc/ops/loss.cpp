#include "ops/loss.h"

namespace liger::LIGER_BACKEND {

Counts allocate_counts(const Scope& scope, const Tensor& target, const OptionalTensor& class_weight, const OptionalTensor& normalizer,
                       int64_t vocab, const CrossEntropyOptions& options, Dtype accumulator, int64_t size) {
  const Tensor values = allocate(scope, {size}, accumulator, target);
  return {values,
          {target.size(0), vocab, static_cast<const int64_t*>(target.data_ptr()), as_vector(class_weight),
           normalizer ? normalizer->data_ptr() : nullptr, options, accumulator, values.data_ptr()}};
}

LossRows::LossRows(const Scope& scope, const Tensor& like, int64_t rows, Dtype accumulator, const LossArguments& arguments)
    : arguments(arguments),
      scope_(scope),
      rows_(rows),
      accumulator_(accumulator),
      has_z_(arguments.lse_square_scale != 0 || arguments.return_z_loss) {
  const std::vector<int64_t> result = per_row() ? std::vector<int64_t>{rows} : std::vector<int64_t>{}, nothing{0};
  loss = allocate(scope, result, accumulator, like);
  z_loss = allocate(scope, arguments.return_z_loss ? result : nothing, accumulator, like);
  token_accuracy = allocate(scope, arguments.return_token_accuracy ? result : nothing, Dtype::f32, like);
  predicted_tokens = allocate(scope, {arguments.return_predicted_tokens ? rows : 0}, ScalarType::Long, like);
  entropy = allocate(scope, {arguments.return_entropy ? rows : 0}, accumulator, like);
  mean_logits = allocate(scope, {arguments.return_mean_logits ? rows : 0}, accumulator, like);
  log_sum_sq = allocate(scope, {arguments.return_log_sum_sq ? rows : 0}, accumulator, like);
  ce_ = allocate(scope, {rows}, accumulator, like);
  if (has_z_) z_ = allocate(scope, {rows}, accumulator, like);
  if (arguments.return_token_accuracy) accuracy_ = per_row() ? token_accuracy : allocate(scope, {rows}, Dtype::f32, like);
}

void LossRows::point(CrossEntropyRows& args, int64_t first_row) const {
  const auto at = [&](const Tensor& t, int64_t bytes) -> void* { return static_cast<char*>(t.data_ptr()) + first_row * bytes; };
  args.ce = at(ce_, dtype_bytes(accumulator_));
  args.z = has_z_ ? at(z_, dtype_bytes(accumulator_)) : nullptr;
  args.accuracy = arguments.return_token_accuracy ? at(accuracy_, sizeof(float)) : nullptr;
  args.entropy = arguments.return_entropy ? at(entropy, dtype_bytes(accumulator_)) : nullptr;
  args.mean = arguments.return_mean_logits ? at(mean_logits, dtype_bytes(accumulator_)) : nullptr;
  args.log_sum_sq = arguments.return_log_sum_sq ? at(log_sum_sq, dtype_bytes(accumulator_)) : nullptr;
  args.predicted = arguments.return_predicted_tokens ? static_cast<int64_t*>(at(predicted_tokens, sizeof(int64_t))) : nullptr;
}

void LossRows::finish(const Counts& counts, bool counted) {
  const bool accuracy = arguments.return_token_accuracy;
  cross_entropy_reduce(
      {rows_, ce_.data_ptr(), has_z_ ? z_.data_ptr() : nullptr, accuracy ? static_cast<const float*>(accuracy_.data_ptr()) : nullptr,
       counts.values.data_ptr(), Reduction(arguments.reduction), accumulator_, loss.data_ptr(),
       arguments.return_z_loss ? z_loss.data_ptr() : nullptr,
       accuracy && !per_row() ? static_cast<float*>(token_accuracy.data_ptr()) : nullptr, counted ? nullptr : &counts.arguments},
      scope_);
}

}  // namespace liger::LIGER_BACKEND
