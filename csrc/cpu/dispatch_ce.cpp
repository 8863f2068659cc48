// Cross entropy and the passes of kernels/elementwise.h on the CPU: checks targets, runs the kernels on threads, and computes the sums over
// rows.
#include <algorithm>
#include <cmath>

#include "cpu/dispatch.h"
#include "kernels/bad_target.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"

namespace liger::cpu {
namespace {

// Kernels use targets as indices, so all targets are checked before the first row is read.
template <class Args> void check_targets(const Args& a, int64_t classes) {
  for (int64_t i = 0; i < a.rows; ++i) {
    const int64_t y = a.target[i];
    if ((y < 0 || y >= classes) && y != a.options.ignore_index)
      throw_bad_target(a.op, a.first_row + i, y, classes, text("ignore_index (", a.options.ignore_index, ")"));
  }
}

void check_gradient_dtype(const char* op, Dtype gradient, Dtype logits) {
  require(gradient == logits, op, ": the gradient of the logits has another dtype than the logits");
}

// Calls f(float{}) or f(double{}).
template <class F> void with_accumulator(Dtype dtype, const F& f) {
  if (dtype == Dtype::f64) f(double{});
  else f(float{});
}

// Sums blocks of 1024 terms, in a fixed order: a million terms have the rounding error of about two thousand.
template <class F> double blocked_sum(int64_t n, const F& term) {
  double total = 0;
  for (int64_t first = 0; first < n; first += 1024) {
    double sum = 0;
    for (int64_t i = first; i < std::min(n, first + 1024); ++i) sum += term(i);
    total += sum;
  }
  return total;
}

double load_number(const void* data, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return *static_cast<const float*>(data);
    case Dtype::f64:
      return *static_cast<const double*>(data);
    default:
      break;
  }
  // A 16-bit number is converted by the kernels' code.
  float number;
  scale_cast({1, 1, {data, 1, dtype}, {&number, 1, Dtype::f32}, nullptr, {}}, {});
  return number;
}

}  // namespace

void cross_entropy_counts(const CrossEntropyCounts& a, Stream) {
  with_accumulator(a.accumulator, [&](auto acc) {
    using Acc = decltype(acc);
    const Acc* const weight = static_cast<const Acc*>(a.class_weight.data);
    const auto counted = [&](int64_t y) { return y != a.options.ignore_index && y >= 0 && y < a.vocab; };
    const double valid = blocked_sum(a.rows, [&](int64_t i) { return a.target[i] != a.options.ignore_index ? 1.0 : 0.0; });
    const double target_weight =
        weight ? blocked_sum(a.rows, [&](int64_t i) { return counted(a.target[i]) ? double(weight[a.target[i]]) : 0.0; }) : valid;
    const double weight_sum = weight ? blocked_sum(a.vocab, [&](int64_t j) { return double(weight[j]); }) : double(a.vocab);

    const auto inverse = [](double denominator) { return denominator != 0 ? 1 / denominator : 0.0; };
    double ce_scale = 1, z_scale = 1;
    if (a.options.reduction != Reduction::none && a.normalizer != nullptr)
      ce_scale = z_scale = inverse(*static_cast<const Acc*>(a.normalizer));
    else if (a.options.reduction == Reduction::mean) {
      ce_scale = inverse(target_weight);
      z_scale = inverse(valid);
    }
    if (valid == 0) ce_scale = z_scale = 0;

    Acc* const counts = static_cast<Acc*>(a.counts);
    std::fill_n(counts, CrossEntropyCounts::slots, Acc(0));
    counts[CrossEntropyCounts::valid] = Acc(valid);
    counts[CrossEntropyCounts::target_weight] = Acc(target_weight);
    counts[CrossEntropyCounts::weight] = Acc(weight_sum);
    counts[CrossEntropyCounts::ce_scale] = Acc(ce_scale);
    counts[CrossEntropyCounts::z_scale] = Acc(z_scale);
    counts[CrossEntropyCounts::scale] = Acc(ce_scale != 0 ? ce_scale : z_scale);
  });
}

void cross_entropy_forward(const CrossEntropyRows& a, Stream) {
  check_targets(a, a.vocab);
  parallel_items(a, a.rows, a.vocab);
}

void cross_entropy_backward(const CrossEntropyBackward& a, Stream) {
  check_targets(a, a.classes.all);
  check_gradient_dtype(a.op, a.dlogits.dtype, a.logits.dtype);
  parallel_items(a, a.rows, a.vocab, {{a.dlogits, a.rows, a.vocab}});
}

void cross_entropy_in_place(const CrossEntropyInPlace& a, Stream) {
  check_targets(a.row, a.row.vocab);
  parallel_items(a, a.row.rows, a.row.vocab);
}

void cross_entropy_statistics(const CrossEntropyStatistics& a, Stream) {
  check_targets(a.row, a.classes.all);
  parallel_items(a, a.row.rows, a.row.vocab);
}

bool cross_entropy_takes_chunks(const CrossEntropyInChunks&, Stream) { return false; }
void cross_entropy_in_chunks(const CrossEntropyInChunks&, Stream) {}
void cross_entropy_merge(const CrossEntropyMerge& a, Stream) {
  check_targets(a.row, a.row.vocab);
  parallel_items(a, a.row.rows, a.chunks * CrossEntropyStatistics::slots);
}

void cross_entropy_reduce(const CrossEntropyReduce& a, Stream stream) {
  if (a.counting != nullptr) cross_entropy_counts(*a.counting, stream);
  with_accumulator(a.accumulator, [&](auto acc) {
    using Acc = decltype(acc);
    const Acc *const ce = static_cast<const Acc*>(a.ce), *const z = static_cast<const Acc*>(a.z),
                     *const counts = static_cast<const Acc*>(a.counts);
    Acc *const loss = static_cast<Acc*>(a.loss), *const z_loss = static_cast<Acc*>(a.z_loss);
    if (a.reduction == Reduction::none) {
      for (int64_t i = 0; i < a.rows; ++i) {
        loss[i] = z != nullptr ? ce[i] + z[i] : ce[i];
        if (z_loss != nullptr) z_loss[i] = z[i];
      }
      return;
    }
    // Without a valid row, all terms and both scales are 0.
    const auto sum = [&](const auto* terms) { return blocked_sum(a.rows, [&](int64_t i) { return double(terms[i]); }); };
    const double ce_sum = counts[CrossEntropyCounts::ce_scale] * sum(ce);
    const double z_sum = z != nullptr ? counts[CrossEntropyCounts::z_scale] * sum(z) : 0.0;
    *loss = Acc(ce_sum + z_sum);
    if (z_loss != nullptr) *z_loss = Acc(z_sum);
    if (a.token_accuracy != nullptr) {
      const double valid = counts[CrossEntropyCounts::valid];
      *a.token_accuracy = valid > 0 ? float(sum(a.accuracy) / valid) : 0.0f;
    }
  });
}

void scale_cast(const ScaleCast& a, Stream) {
  if (a.cols == 0) return;
  if (a.row_scale.data == nullptr) return parallel_elements<&ScaleCast::in, &ScaleCast::out>(a);
  parallel_items(a, a.rows, a.cols);
}

void fill_rows(const FillRows& a, Stream) { parallel_items(a, a.rows, a.cols); }

int64_t column_sum_workspace(const ColumnSum&, Stream) { return 0; }

void column_sum(const ColumnSum& a, Stream) { parallel_items(a, a.cols, a.rows); }

void scalar_product(const ScalarProduct& a, Stream) {
  with_accumulator(a.accumulator, [&](auto acc) {
    using Acc = decltype(acc);
    double product = a.scale;
    if (a.a.data != nullptr) product *= load_number(a.a.data, a.a.dtype);
    if (a.b != nullptr) product *= *static_cast<const Acc*>(a.b);
    Acc* const out = static_cast<Acc*>(a.out);
    out[0] = Acc(product);
    if (a.factors.data == nullptr) return;
    double largest = 0;
    for (int64_t i = 0; i < a.rows; ++i) {
      const auto* factor = static_cast<const char*>(a.factors.data) + i * a.factors.stride * dtype_bytes(a.factors.dtype);
      largest = std::fmax(largest, std::fabs(load_number(factor, a.factors.dtype)));
    }
    int above = 0;
    if (std::isfinite(largest) && std::frexp(largest, &above) == 0.5) above -= 1;  // `largest` is a power of two
    const double power = std::exp2(std::clamp(above, -100, 100));
    out[1] = Acc(product * power);
    out[2] = Acc(1 / power);
  });
}

}  // namespace liger::cpu
