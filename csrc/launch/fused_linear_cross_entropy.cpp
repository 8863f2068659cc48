// For op_plans.h: the launches of the fused loss, whose order stands in ops/fused_linear_cross_entropy.cpp.
#include <algorithm>

#include "launch/chunks.h"
#include "launch/elementwise.h"
#include "launch/losses.h"
#include "launch/norms.h"

namespace liger::launch {
namespace {

const Fact hidden{"hidden", 1}, chunk_rows{"chunk_rows"}, chunk_classes{"chunk_classes"};  // 0: all at a time
const Fact overlaid{"overlaid"};  // of the gradients of chunk_classes classes

bool cuts_vocabulary(const Call& call) { return call[chunk_classes] > 0 && call[chunk_classes] < call.cols; }
// Launches of a fused loss all of whose gradients are wanted.
Gradients mode_of(const Call& call) {
  if (call[overlaid] && call.rows > 0) return Gradients::overlaid;
  return gradients_of(true, true, (call[chunk_rows] == 0 || call.rows <= call[chunk_rows]) && !cuts_vocabulary(call), call[per_row] != 0);
}
int64_t chunk_of(const Call& call) { return equal_chunks(call.rows, call[chunk_rows] ? call[chunk_rows] : call.rows); }
int tile_vec_of(const Call& call) { return call.aligned ? matrix_vec : 1; }

// Sums of columns of the logits' gradient: dbias.
void add_dbias(Launches& out, const DeviceProfile& device, const Call& call, int64_t rows, int64_t cols) {
  out.push_back(partial_columns(device, rows, cols, tile_vec_of(call)));
  out.push_back(sum_columns(device, out.back().plan.partial_rows, cols, 0));
}

void add_matrix(Launches& out, const DeviceProfile& device, const Call& call, const Kernel& kernel, int64_t rows, int64_t cols) {
  if (rows * cols > 0) out.push_back(row_tiles(device, kernel, tiled_matrix(rows, cols, tile_vec_of(call))));
}

// Of a chunk of rows and, if the vocabulary is cut, of its first chunk. gradient: of the logits, in their place. sums: of its columns.
void add_chunk(Launches& out, const DeviceProfile& device, const Call& call, bool gradient, bool sums) {
  if (call.rows == 0) return;
  const int64_t rows = chunk_of(call);
  Call of = call;
  if (cuts_vocabulary(call)) of.cols = call[chunk_classes];
  const auto add_bias = [&] {  // but for matmuls that add it themselves (gpu/gemm.cu)
    if (call[bias]) add_matrix(out, device, call, fill_kernel, rows, of.cols);
  };
  add_bias();
  if (!cuts_vocabulary(call)) {
    if (gradient) out.push_back(cross_entropy_in_place(device, logits(call, rows, true), !call[full], &call.knobs));
    else out.push_back(cross_entropy_forward(device, logits(call, rows, false), false, &call.knobs));
  } else {
    out.push_back(cross_entropy_statistics(device, logits(of, rows, false)));
    out.push_back(cross_entropy_merge(device, rows));
    if (!gradient) return;
    add_bias();
    out.push_back(cross_entropy_backward(device, logits(of, rows, false), &call.knobs));
    add_matrix(out, device, call, scale_kernel, rows, call[hidden]);
  }
  if (call[bias] && sums) add_dbias(out, device, call, rows, of.cols);
}

std::vector<OverlaidChunk> overlaid_chunks_of(const Call& call) {
  return overlaid_chunks(call.rows, call[hidden], call.cols, call[chunk_classes],
                         overlaid_aside(call.rows, call[hidden], call.cols, call[chunk_classes]));
}
Call with_classes(const Call& call, int64_t classes) {
  Call of = call;
  of.cols = classes;
  return of;
}

// The gradient of logits in chunks of the vocabulary: of all of them in one pass, where the device has that, or by way of each chunk's
// statistics.
void add_overlaid(Launches& out, const DeviceProfile& device, const Call& call) {
  const auto chunks = overlaid_chunks_of(call);
  const auto add_bias = [&](int64_t classes) {
    if (call[bias]) add_matrix(out, device, call, fill_kernel, call.rows, classes);
  };
  const auto add_statistics = [&](int64_t classes) {
    out.push_back(cross_entropy_statistics(device, logits(with_classes(call, classes), call.rows, false)));
  };
  const int64_t at_a_time = call.cols * call[hidden] / call.rows / 64 * 64;
  int others = 0, stored = 0;
  for (int64_t first = call[chunk_classes]; first < call.cols; first += at_a_time, ++others) {
    add_bias(std::min(at_a_time, call.cols - first));
    add_statistics(std::min(at_a_time, call.cols - first));
  }
  for (const OverlaidChunk& chunk : chunks) {
    if (!chunk.again) add_bias(chunk.classes);
    stored += !chunk.again;
  }
  const Call pass = with_classes(call, std::min(call[chunk_classes], call.cols));
  if (stored > 0 && others <= 1)
    if (const auto made = cross_entropy_in_chunks(device, logits(pass, call.rows, true), !call[full], stored, &call.knobs))
      return out.push_back(*made);
  for (const OverlaidChunk& chunk : chunks)
    if (!chunk.again) add_statistics(chunk.classes);
  out.push_back(cross_entropy_merge(device, call.rows));
  for (const OverlaidChunk& chunk : chunks)
    if (!chunk.again)
      out.push_back(cross_entropy_backward(device, logits(with_classes(call, chunk.classes), call.rows, false), &call.knobs));
}

// What a sum of rows takes to become narrower: in its own memory, from where it is wider, ever more rows at a time.
void add_narrowing(Launches& out, const DeviceProfile& device, const Call& call, int64_t all, int64_t here) {
  const int64_t ratio = call.element_bytes == 2 ? 2 : 1;
  const auto add = [&](int64_t rows) { add_matrix(out, device, call, scale_kernel, rows, call[hidden]); };
  if (ratio == 1) return add(here);
  int64_t done = std::min(narrowed_elsewhere, here);
  add(done);
  add(done);
  for (int64_t next; done > 0 && done < here; done = next) {
    next = std::min(done * ratio, here);
    add(next - done);
  }
  add(all - here);
}

Launches fused_loss(const DeviceProfile& device, const Call& call) {
  Launches first;
  if (mode_of(call) == Gradients::overlaid) add_overlaid(first, device, call);
  else add_chunk(first, device, call, mode_of(call) != Gradients::recomputed, mode_of(call) == Gradients::accumulated);
  return with_sums(device, call, first, true);
}

Launches fused_loss_gradient(const DeviceProfile& device, const Call& call) {
  Launches out{product(device, call[per_row] ? call.rows : 1)};
  if (call.rows == 0) return out;
  const int64_t ratio = call.element_bytes == 2 ? 2 : 1;
  if (mode_of(call) == Gradients::deferred) {
    // Matmuls write the gradients; each row's own factor goes into dx and, for dweight, into a copy of x.
    for (int i = 0; call[per_row] && i < 2; ++i) add_matrix(out, device, call, scale_kernel, call.rows, call[hidden]);
    if (call[bias]) add_dbias(out, device, call, call.rows, call.cols);
  } else if (mode_of(call) == Gradients::overlaid) {
    const auto chunks = overlaid_chunks_of(call);
    const bool all = call[chunk_classes] >= call.cols;
    const int64_t aside = overlaid_aside(call.rows, call[hidden], call.cols, call[chunk_classes]);
    const int64_t sum_rows = overlaid_sum_rows(call.rows, call[hidden], call.element_bytes, 4,
                                               all ? overlaid_spare(call.rows, call[hidden], aside) * call.element_bytes : 0);
    if (call.element_bytes == 2 || call[per_row]) add_narrowing(out, device, call, call.rows, sum_rows);
    if (call[per_row]) add_matrix(out, device, call, scale_kernel, call.rows, call[hidden]);
    for (const OverlaidChunk& chunk : chunks)
      if (call[bias]) add_dbias(out, device, call, call.rows, chunk.classes);
    if (chunks[0].place == OverlaidChunk::Place::dweight && !chunks[0].again)
      add_matrix(out, device, call, scale_kernel, chunks[0].classes, call[hidden]);
    for (const OverlaidChunk& chunk : chunks) {
      if (!chunk.again) continue;
      if (call[bias]) add_matrix(out, device, call, fill_kernel, call.rows, chunk.classes);
      out.push_back(cross_entropy_backward(device, logits(with_classes(call, chunk.classes), call.rows, false), &call.knobs));
    }
  } else {
    if (mode_of(call) == Gradients::recomputed) {
      add_matrix(out, device, call, scale_kernel, chunk_of(call), call[hidden]);
      add_chunk(out, device, call, true, true);
      add_matrix(out, device, call, scale_kernel, call.rows, call[hidden]);
    } else {
      add_matrix(out, device, call, scale_kernel, 1, call.rows * call[hidden]);
    }
    add_narrowing(out, device, call, call.cols, ratio == 1 ? call.cols : call.cols / ratio / 64 * 64);
  }
  if (call[bias]) add_matrix(out, device, call, scale_kernel, 1, call.cols);
  return out;
}

const Planned forward{"fused_linear_cross_entropy",
                      fused_loss,
                      {&fill_kernel, &in_place_held, &in_place_kernel, &cross_entropy_forward_kernel, &statistics_kernel, &merge_kernel,
                       &cross_entropy_backward_kernel, &scale_kernel, &count_targets_kernel, &sum_losses_kernel, &add_losses_kernel,
                       &partial_columns_kernel, &sum_columns_kernel}};
const Planned backward{"fused_linear_cross_entropy_backward",
                       fused_loss_gradient,
                       {&product_kernel, &scale_kernel, &fill_kernel, &in_place_held, &in_place_kernel, &statistics_kernel, &merge_kernel,
                        &cross_entropy_backward_kernel, &partial_columns_kernel, &sum_columns_kernel}};

}  // namespace
}  // namespace liger::launch
