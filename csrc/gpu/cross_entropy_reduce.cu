// The sums over all rows that cross entropy needs. Before the pass over the logits, if a row's result depends on them: the counts
// (cross_entropy_counts). After the pass: the loss (cross_entropy_reduce), and the counts if they are not computed yet.
//
// Latency bounds these kernels, since there are only a few bytes per row. One block computes a sum over all rows: each thread sums some
// rows, with several loads in flight, and the block adds up the threads' sums in a fixed order. So there are no atomics and no second
// kernel, and results have the same bits in every run. A thread sums a batch of rows in fp32 and the batches in fp64, so that a sum over
// millions of rows has full fp32 precision.
#include "gpu/device.h"
#include "gpu/rows.h"
#include "kernels/cross_entropy.h"
#include "launch/arguments.h"

namespace liger::gpu {
namespace {

constexpr int in_flight = 8;
using Counts = CrossEntropyCounts;

// Sums N values over the block; thread 0 has the result.
template <int N> LIGER_DEVICE void block_sum(double (&v)[N]) {
  const Shared<double> warp_sums = shared<double>(0);
  const auto over_warp = [&] {
#pragma unroll 1
    for (int mask = warp_width() / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] += shfl_xor(v[i], mask);
  };
  over_warp();
  block_barrier();  // all threads have read the shared memory of an earlier sum
  if (lane_id() == 0)
#pragma unroll
    for (int i = 0; i < N; ++i) warp_sums[i * 32 + warp_id()] = v[i];
  block_barrier();
  if (warp_id() > 0) return;
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = lane_id() < block_threads() / warp_width() ? warp_sums[i * 32 + lane_id()] : 0;
  over_warp();
}

// Returns this thread's part of the sum of value(0) ... value(n - 1).
template <class Value> LIGER_DEVICE double thread_sum(int64_t n, Value value) {
  double sum = 0;
  for (int64_t first = thread_id(); first < n; first += int64_t{block_threads()} * in_flight) {
    float part = 0;
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const int64_t i = first + int64_t{k} * block_threads();
      if (i < n) part += value(i);
    }
    sum += part;
  }
  return sum;
}
// The same for values in memory, 16 bytes at a time. The code is short, because a training step runs this kernel once and fetches its code
// from memory first.
LIGER_DEVICE double thread_sum(const float* values, int64_t n) {
  constexpr int K = 4, N = 4;
  const int threads = block_threads();
  double sum = 0;
#pragma unroll 1
  for (int64_t batch = 0; batch * N < n; batch += threads * K) {
    const Columns<N, K> columns(thread_id(), threads, batch * N, n / N * N);
    Packed<float, N> in[K];
    columns.load(in, values);
    float part = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < N; ++i) part += in[k][i];
    sum += part;
  }
  const int64_t rest = n / N * N + thread_id();
  return rest < n ? sum + values[rest] : sum;
}

struct CountTargets {
  struct Args {
    int64_t rows, vocab;
    const int64_t* target;
    Vector class_weight;
    const float* normalizer;
    int64_t ignore_index;
    Reduction reduction;
    float* counts;
  };
  static constexpr int max_threads = launch::count_targets_kernel.instance().max_threads;

  struct Scales {
    double valid;
    float ce, z;
  };

  static LIGER_DEVICE void run(const Args& a) {
    let_next_kernel_start();
    count(a);
  }
  // All threads of the block call it together. Thread 0 stores the counts, and returns the scales of the losses.
  static LIGER_DEVICE Scales count(const Args& a) {
    enum { valid, target_weight, weight, sums };
    double sum[sums] = {};
    const bool weighted = a.class_weight.data != nullptr;
    for (int64_t first = thread_id(); first < a.rows; first += int64_t{block_threads()} * in_flight) {
      int64_t target[in_flight];
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        const int64_t row = first + int64_t{k} * block_threads();
        target[k] = row < a.rows ? a.target[row] : a.ignore_index;
      }
      int found = 0;
      float weights = 0;
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        const bool counts = target[k] != a.ignore_index;
        found += counts;
        if (weighted && counts && target[k] >= 0 && target[k] < a.vocab)
          weights += load_one(a.class_weight.data, a.class_weight.dtype, target[k]);
      }
      sum[valid] += found;
      sum[target_weight] += weights;
    }
    if (weighted)
      sum[weight] = thread_sum(a.vocab, [&](int64_t column) { return load_one(a.class_weight.data, a.class_weight.dtype, column); });
    block_sum(sum);
    if (thread_id() != 0) return {};
    if (!weighted) sum[target_weight] = sum[valid], sum[weight] = double(a.vocab);
    double ce = 1, z = 1;
    if (a.reduction != Reduction::none && a.normalizer) ce = z = *a.normalizer;
    else if (a.reduction == Reduction::mean) ce = sum[target_weight], z = sum[valid];
    a.counts[Counts::valid] = float(sum[valid]);
    a.counts[Counts::target_weight] = float(sum[target_weight]);
    a.counts[Counts::weight] = float(sum[weight]);
    const bool none = sum[valid] == 0;
    const Scales scales{sum[valid], none || ce == 0 ? 0.f : float(1 / ce), none || z == 0 ? 0.f : float(1 / z)};
    a.counts[Counts::ce_scale] = scales.ce;
    a.counts[Counts::z_scale] = scales.z;
    a.counts[Counts::scale] = scales.ce != 0 ? scales.ce : scales.z;
    return scales;
  }
};

// With programmatic dependent launch this kernel may start while the kernel over the rows still runs, and counts the targets meanwhile.
struct SumLosses {
  struct Args {
    CountTargets::Args counting;
    bool counts_here;  // this kernel counts the targets, because no earlier one has
    const float *ce, *z, *accuracy;
    float *loss, *z_loss, *token_accuracy;
  };
  static constexpr int max_threads = launch::sum_losses_kernel.instance().max_threads;

  static LIGER_DEVICE void run(const Args& a) {
    CountTargets::Scales scales = {};
    if (a.counts_here) scales = CountTargets::count(a.counting);
    wait_for_previous_kernel();
    const float* const counts = a.counting.counts;
    if (!a.counts_here) scales = {counts[Counts::valid], counts[Counts::ce_scale], counts[Counts::z_scale]};
    enum { ce, z, accuracy, sums };
    const auto column = [&](const float* values) { return values ? thread_sum(values, a.counting.rows) : 0.0; };
    double sum[sums] = {column(a.ce), column(a.z), column(a.accuracy)};
    block_sum(sum);
    if (thread_id() != 0) return;
    const double z_loss = a.z ? sum[z] * scales.z : 0.0;
    if (a.loss) *a.loss = float(sum[ce] * scales.ce + z_loss);
    if (a.z_loss) *a.z_loss = float(z_loss);
    if (a.token_accuracy) *a.token_accuracy = scales.valid == 0 ? 0.f : float(sum[accuracy] / scales.valid);
  }
};

// For reduction "none": adds each row's cross entropy and z loss.
struct AddLosses {
  struct Args {
    int64_t rows;
    const float *ce, *z;
    float *loss, *z_loss;
  };
  static constexpr int max_threads = launch::add_losses_kernel.instance().max_threads;

  static LIGER_DEVICE void run(const Args& a) {
    const int64_t row = block_id() * block_threads() + thread_id();
    if (row >= a.rows) return;
    const float z = a.z ? a.z[row] : 0.f;
    if (a.loss) a.loss[row] = a.ce[row] + z;
    if (a.z_loss) a.z_loss[row] = z;
  }
};

CountTargets::Args count_arguments(const CrossEntropyCounts& op) {
  return {op.rows,
          op.vocab,
          op.target,
          op.class_weight,
          static_cast<const float*>(op.normalizer),
          op.options.ignore_index,
          op.options.reduction,
          static_cast<float*>(op.counts)};
}

}  // namespace

void cross_entropy_counts(const CrossEntropyCounts& op, Stream stream) {
  launch<CountTargets>(launch::op_launch(device_profile(stream.device), op), count_arguments(op), stream);
}

void cross_entropy_reduce(const CrossEntropyReduce& op, Stream stream) {
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  const auto *ce = static_cast<const float*>(op.ce), *z = static_cast<const float*>(op.z);
  auto *loss = static_cast<float*>(op.loss), *z_loss = static_cast<float*>(op.z_loss);
  if (op.reduction == Reduction::none) {
    if (op.counting) cross_entropy_counts(*op.counting, stream);
    if (op.rows > 0) launch<AddLosses>(config, {op.rows, ce, z, loss, z_loss}, stream);
    return;
  }
  CountTargets::Args counting{.rows = op.rows, .counts = const_cast<float*>(static_cast<const float*>(op.counts))};
  if (op.counting) counting = count_arguments(*op.counting);
  launch<SumLosses>(config, {counting, op.counting != nullptr, ce, z, op.accuracy, loss, z_loss, op.token_accuracy}, stream);
}

}  // namespace liger::gpu
