#include "kernels/cross_entropy.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::cross_entropy_counts) cross_entropy_counts;
decltype(cpu::cross_entropy_forward) cross_entropy_forward;
decltype(cpu::cross_entropy_backward) cross_entropy_backward;
decltype(cpu::cross_entropy_in_place) cross_entropy_in_place;
decltype(cpu::cross_entropy_takes_chunks) cross_entropy_takes_chunks;
decltype(cpu::cross_entropy_in_chunks) cross_entropy_in_chunks;
decltype(cpu::cross_entropy_statistics) cross_entropy_statistics;
decltype(cpu::cross_entropy_merge) cross_entropy_merge;
decltype(cpu::cross_entropy_reduce) cross_entropy_reduce;
}  // namespace liger::gpu

namespace liger::cpu {

void cross_entropy_counts(const CrossEntropyCounts& a, Stream stream) {
  const Buffers buffers{in("target", a.target, a.rows, i64), in("weight", a.class_weight, a.vocab), in("normalizer", a.normalizer, 1, f32),
                        out("counts", a.counts, CrossEntropyCounts::slots, f32)};
  gpu::cross_entropy_counts(a, stream);
}

namespace {

// Returns the weights of all classes; `chunk` has the part for the classes of one chunk.
Vector all_weights(const Vector& chunk, const Classes& classes) {
  return {chunk.data ? static_cast<const float*>(chunk.data) - classes.first : nullptr, chunk.dtype};
}

// The buffers of the passes over one matrix of logits, and of the merge. `gradient` may be empty, and may lie in the logits' memory.
template <class Op, class... More>
Buffers logit_buffers(const Op& a, const Classes& all_classes, const CrossEntropyRows& results, const void* lse, const Rows& grad,
                      const MutableRows& gradient, const More&... more) {
  const auto skipped = [rows = a.rows, classes = all_classes.all, target = a.target, ignored = a.options.ignore_index](int64_t row) {
    const int64_t wanted = target[row % rows];
    return wanted == ignored || wanted < 0 || wanted >= classes;
  };
  return {
      optional_rows(in("logits", a.logits, a.rows, a.vocab), skipped),
      in("target", a.target, a.rows, i64),
      optional(in("weight", all_weights(a.class_weight, all_classes), all_classes.all)),  // not read for classes that are no row's target
      optional(in("counts", a.counts, CrossEntropyCounts::slots, f32)),  // read with some options only
      optional_rows(in("saved lse", lse, 2 * a.rows, f32), skipped),
      in("grad", grad, a.rows, 1),
      optional_rows(in("temperature", a.temperature, a.rows, f32), skipped),
      out("ce", results.ce, a.rows, f32),
      out("z", results.z, a.rows, f32),
      out("lse", results.lse, 2 * a.rows, f32),
      out("accuracy", results.accuracy, a.rows, f32),
      out("predicted", results.predicted, a.rows, i64),
      out("entropy", results.entropy, a.rows, f32),
      out("mean", results.mean, a.rows, f32),
      out("log_sum_sq", results.log_sum_sq, a.rows, f32),
      out("gradient", gradient, a.rows, a.vocab),
      more...};
}

}  // namespace

// A bad target raises its error at once, as on the CPU.
void cross_entropy_forward(const CrossEntropyRows& a, Stream stream) {
  const Buffers buffers = logit_buffers(a, {0, a.vocab}, a, nullptr, {}, {});
  gpu::cross_entropy_forward(a, stream);
  gpu::raise_reported_targets();
}
void cross_entropy_backward(const CrossEntropyBackward& a, Stream stream) {
  const Buffers buffers = logit_buffers(a, a.classes, {}, a.lse, a.grad, a.dlogits, in("token", a.token, a.rows, f32),
                                        optional(in("mix", a.mix, 4 * a.rows, f32)));
  gpu::cross_entropy_backward(a, stream);
  gpu::raise_reported_targets();
}
void cross_entropy_in_place(const CrossEntropyInPlace& a, Stream stream) {
  const Buffers buffers = logit_buffers(a.row, {0, a.row.vocab}, a.row, nullptr, {}, a.gradient());
  gpu::cross_entropy_in_place(a, stream);
  gpu::raise_reported_targets();
}

bool cross_entropy_takes_chunks(const CrossEntropyInChunks& a, Stream stream) { return gpu::cross_entropy_takes_chunks(a, stream); }
void cross_entropy_in_chunks(const CrossEntropyInChunks& a, Stream stream) {
  const CrossEntropyRows& row = a.row;
  std::vector<Buffer> buffers{in("target", row.target, row.rows, i64),
                              optional(in("weight", row.class_weight, row.vocab)),
                              optional(in("counts", row.counts, CrossEntropyCounts::slots, f32)),
                              out("ce", row.ce, row.rows, f32),
                              out("z", row.z, row.rows, f32),
                              out("lse", row.lse, 2 * row.rows, f32),
                              out("accuracy", row.accuracy, row.rows, f32),
                              out("predicted", row.predicted, row.rows, i64),
                              optional(in("temperature", row.temperature, row.rows, f32)),
                              out("entropy", row.entropy, row.rows, f32),
                              out("mean", row.mean, row.rows, f32),
                              out("log_sum_sq", row.log_sum_sq, row.rows, f32),
                              optional(in("others", a.others, CrossEntropyStatistics::slot_count(row.moments()) * row.rows, f32))};
  for (int i = 0; i < a.count; ++i) {
    const int64_t end = i + 1 < a.count ? a.chunks[i + 1].first : row.vocab;
    Buffer chunk = matrix("chunk", a.chunks[i].logits, row.rows, end - a.chunks[i].first, Content::both);
    chunk.each = 0;
    buffers.push_back(chunk);
  }
  const Buffers watched(buffers);
  gpu::cross_entropy_in_chunks(a, stream);
  gpu::raise_reported_targets();
}

void cross_entropy_statistics(const CrossEntropyStatistics& a, Stream stream) {
  const Buffers buffers = logit_buffers(a.row, a.classes, {}, nullptr, {}, {},
                                        out("statistics", a.statistics, CrossEntropyStatistics::slot_count(a.moments) * a.row.rows, f32),
                                        out("best class", a.best_class, a.row.rows, i64));
  gpu::cross_entropy_statistics(a, stream);
  gpu::raise_reported_targets();
}

void cross_entropy_merge(const CrossEntropyMerge& a, Stream stream) {
  using Slots = CrossEntropyStatistics;
  const int64_t slots = Slots::slot_count(a.row.moments());
  const auto unread = [rows = a.row.rows, slots, predictions = a.best_class != nullptr](int64_t at) {
    const int64_t slot = at / rows % slots;  // a moment is not read where the sum is 0
    return slot == Slots::moment || (slot == Slots::best && !predictions);
  };
  CrossEntropyRows row = a.row;
  row.temperature = nullptr;  // the statistics include it
  const Buffers buffers = logit_buffers(row, {0, row.vocab}, row, nullptr, {}, {},
                                        optional_rows(in("statistics", a.statistics, a.chunks * slots * a.row.rows, f32), unread),
                                        in("best class", a.best_class, a.chunks * a.row.rows, i64), out("token", a.token, a.row.rows, f32));
  gpu::cross_entropy_merge(a, stream);
  gpu::raise_reported_targets();
}

void cross_entropy_reduce(const CrossEntropyReduce& a, Stream stream) {
  const int64_t losses = a.reduction == Reduction::none ? a.rows : 1;
  const Buffer accuracy = in("accuracy", a.accuracy, a.rows, f32);
  const CrossEntropyCounts counting = a.counting ? *a.counting : CrossEntropyCounts{};
  const Buffers buffers{in("ce", a.ce, a.rows, f32),
                        in("target", counting.target, counting.rows, i64),
                        in("weight", counting.class_weight, counting.vocab),
                        out("counts", counting.counts, CrossEntropyCounts::slots, f32),
                        in("z", a.z, a.rows, f32),
                        a.token_accuracy ? accuracy : optional(accuracy),
                        optional(in("counts", a.counts, CrossEntropyCounts::slots, f32)),
                        out("loss", a.loss, losses, f32),
                        out("z_loss", a.z_loss, losses, f32),
                        out("token_accuracy", a.token_accuracy, 1, f32)};
  gpu::cross_entropy_reduce(a, stream);
}

}  // namespace liger::cpu
