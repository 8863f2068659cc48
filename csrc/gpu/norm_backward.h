// The backward of RMSNorm, add+RMSNorm and LayerNorm. Bound by memory: mostly, dy and z are read once and dz is written once.
//
//   n = (z - mean) * rstd,  g = dy * (weight + offset)
//   dz = rstd * (g - mean(g) - n * mean(g * n)) [+ dsum],  dweight = sum of dy * n over rows,  dbias = sum of dy over rows
// RMSNorm has no mean, and no term with mean(g).
//
// NormBackwardRegisters: persistent blocks walk over rows. A thread owns 4 to 24 columns. Their weights and fp32 sums stay in its
// registers, and a RowStream fetches the next rows while the current one is reduced. Rows that a block cannot hold are held by a cluster of
// blocks, where the device has clusters. Elsewhere a thread may own four vectors (32 columns, fp32: 16) and loads their weights again for
// each row (walk_with_few_registers). Each block, or cluster, writes one partial row of its sums: by default at most two partial rows per
// multiprocessor. column_sum.h adds up the partial rows.
//
// Other files have the kernels for longer rows and mixed dtypes (norm_backward_two_pass.h), for few rows (norm_backward_few.h), and for
// most calls without dweight and dbias (norm_backward_rows.h).
#pragma once
#include "gpu/device.h"
#include "gpu/row_stream.h"
#include "gpu/row_warps.h"
#include "kernels/norms.h"
#include "launch/norms.h"

namespace liger::gpu {

// The arguments of the kernels: NormBackward's fields, and values of the launch.
struct NormBackwardArgs {
  int64_t rows, cols;
  Rows dy, dsum, z;
  Vector weight;
  const float *mean, *rstd;
  MutableRows dz;
  MutableVector dweight, dbias;
  float offset;
  float inverse_cols = 0;
  float* partial = nullptr;  // [partial rows, cols]: sums for dweight; LayerNorm: [partial rows, 2 * cols], dbias behind them
  float* row_means = nullptr;  // [rows, 2]: mean(g), mean(g * n); only for norm_backward_two_pass.h
  int threads_per_row = 0, stages = 0, ring_offset = 0;
  int64_t row_step = 0;  // rows that all blocks together process at a time
  int64_t rows_per_block = 0;  // only for norm_backward_two_pass.h's second kernel
  int64_t tile_blocks = 0;  // only for norm_backward_few.h: the first blocks, which sum columns; the others process rows
};

// Loads the factors of VEC columns: weight + offset, or 1 if there is no weight.
template <int VEC> LIGER_DEVICE void load_weight(float (&weight)[VEC], const NormBackwardArgs& a, int64_t column) {
  if (a.weight.data) load_any(weight, a.weight.data, a.weight.dtype, column);
#pragma unroll
  for (int i = 0; i < VEC; ++i) weight[i] = a.weight.data ? weight[i] + a.offset : 1;
}

// A thread's sums over rows, for its columns.
template <int VEC, int K, bool Centered> struct NormBackwardSums {
  float dweight[K][VEC] = {}, dbias[K][VEC] = {};

  // Writes the block's partial row. If the block processes several rows at a time, their sums are added up in shared memory, in a fixed
  // order; they overwrite the ring buffers there, which are no longer needed.
  template <class Group> LIGER_DEVICE void store(const NormBackwardArgs& a, const Group& group, const Columns<VEC, K>& columns) const {
    const int width = int(Centered ? 2 * a.cols : a.cols), groups = group.rows_per_block();
    float* const partial = a.partial + group.cluster_index() * width;
    if (groups == 1) return store_sums<true>(opaque(partial), a, columns);
    const Shared<float> all = shared<float>(Group::template shared_bytes<2>());  // [groups][width]
    block_barrier();
    store_sums<false>(&all[group.row_in_block * width], a, columns);
    block_barrier();
    constexpr int N = VEC > 1 ? 4 : 1;
    for (int col = thread_id() * N; col < width; col += block_threads() * N) {
      Vec<float, N> total = {};
#pragma unroll 4
      for (int row = 0; row < groups; ++row) {
        Vec<float, N> one;
        load(one, &all[row * width + col]);
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] += one[i];
      }
      gpu::store(partial + col, total);
    }
  }

 private:
  // Global: whether `row` is in global memory. Accesses by a pointer that may point to global and to shared memory are slower on AMD.
  template <bool Global> LIGER_DEVICE void store_sums(float* row, const NormBackwardArgs& a, const Columns<VEC, K>& columns) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float* const to = row + columns.first + k * columns.step;
      store_floats<Global>(to, dweight[k], columns.has(k));
      if constexpr (Centered) store_floats<Global>(to + a.cols, dbias[k], columns.has(k));
    }
  }
};

// K: vectors per thread. Layout: threads of a row in a block, or launch::whole_warps; 0: the plan sets it. Residual: dsum is present.
template <class T, int VEC, int K, int Layout, bool Centered, bool Residual> struct NormBackwardRegisters {
  using Args = NormBackwardArgs;
  static constexpr bool in_warps = Layout == launch::whole_warps;
  // Whether a row's dz is computed behind the sums of the next row, so that the exchange between a row's warps takes place meanwhile.
  static constexpr bool overlaps_rows = Layout == launch::overlapped_rows;
  static constexpr int block_row = overlaps_rows ? 512 : in_warps ? 0 : Layout;  // threads of a row in a block; 0: set by the plan
  static constexpr int max_threads = launch::norm_backward_registers.instance(VEC, K, Layout).max_threads;
  static constexpr int min_blocks = 1;  // a thread may have as many registers as there are
  // Four vectors and their sums take almost all registers.
  static constexpr bool has_few_registers = VEC > 1 && K == 4;
  // Whether a row stays in shared memory until its dz is computed, because registers do not hold it.
  static constexpr bool reads_twice = has_async_copies && launch::norm_backward_reads_twice(Centered, VEC, K);
  // Plans use four vectors of 16 bytes per thread only on devices without bulk copies, and three only on devices with them.
  static constexpr bool is_used = has_bulk_copies ? !has_few_registers : K != 3 && !overlaps_rows;

  static LIGER_DEVICE void run(const Args& a) {
    if constexpr (is_used && has_few_registers) walk_with_few_registers(a);
    else if constexpr (is_used && overlaps_rows) walk_overlapped(a);
    else if constexpr (is_used) walk(a);
  }

 private:
  enum { dy, z, dsum, inputs = Residual ? 3 : 2 };
  using Group = std::conditional_t<in_warps, RowWarps<false>, BasicRowGroup<block_row, true, Layout == 0>>;
  using Tile = Columns<VEC, K>;
  using Sums = NormBackwardSums<VEC, K, Centered>;
  using Inputs = Packed<T, VEC>[inputs][K];
  using InputVectors = Vectors<T, VEC, inputs>;
  using Floats = float[K][VEC];
  struct Statistics {
    float mean, rstd;
  };
  using RowSums = float[Centered ? 2 : 1];  // over a row's columns: of g * n and, for LayerNorm, of g
  // Whether the rows of a block may execute different numbers of iterations: false where a warp may have several rows, or the rows share a
  // barrier.
  static constexpr bool independent_rows = block_row == 512 || (in_warps && has_group_barriers);

  static LIGER_DEVICE void walk(const Args& a) {
    // The last argument: whether to use asynchronous copies (Ampere, Ada). LayerNorm computes more per element, and is slower with them.
    using Stream = RowStream<Group, T, VEC, K, inputs, 2, !Centered>;
    Group group(a.threads_per_row);
    const Tile columns = warp_columns<VEC, K>(group, a.cols);
    const int64_t step = a.row_step, end = row_end(a.rows, group);
    int64_t row = group.first_row();
    Stream stream(group, steps(a, row), a.stages, a.ring_offset);
    const Weights weights(a, columns);
    T* dz = opaque(static_cast<T*>(a.dz.data) + (row * a.dz.stride + columns.first));
    Sums sums;
    Statistics next = statistics(a, row);
    for (; row < end; row += step, dz += step * a.dz.stride) {
      Inputs in;
      stream.take(in);
      if (a.stages == 1) stream.release();  // otherwise, with one stage, no load would be in flight until the row's sums are computed
      const bool live = independent_rows || row < a.rows;
      if (!live) clear(in);
      const Statistics row_statistics = next;
      next = statistics(a, row + step);
      Floats g;
      Parts parts;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        weights.multiply(g[k], in[dy][k], k);
        add(sums, parts, k, g[k], vectors_at(in, k), row_statistics);
      }
      RowSums row_sums;
      parts.total(row_sums);
      if (a.dz.data) group.sum(row_sums);
      if (a.stages > 1) stream.release();  // here all loads are complete: before the sum, release()'s fence would slow the kernel down
      if (a.dz.data == nullptr) continue;
      forget_widened(in);
      const Gradient gradient(row_statistics, row_sums, a.inverse_cols);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Packed<T, VEC> out = gradient(g[k], vectors_at(in, k));
        if (live && columns.has(k)) store<Hint::stream>(dz + k * columns.step, out);
      }
    }
    let_next_kernel_start();
    if (a.partial) sums.store(a, group, columns);
  }

  // walk() for rows with a block or cluster to themselves, which computes the sums of the next row between both steps of an exchange. It
  // computes g twice, because registers for it would cost more.
  static LIGER_DEVICE void walk_overlapped(const Args& a) {
    static_assert(independent_rows);
    using Stream = RowStream<Group, T, VEC, K, inputs, 2, !Centered>;
    Group group(a.threads_per_row);
    const Tile columns = warp_columns<VEC, K>(group, a.cols);
    const int64_t step = a.row_step;
    int64_t row = group.first_row();
    Stream stream(group, steps(a, row), a.stages, a.ring_offset);
    const Weights weights(a, columns);
    T* dz = opaque(static_cast<T*>(a.dz.data) + (row * a.dz.stride + columns.first));
    Sums sums;
    Inputs in;
    RowSums row_sums;
    Statistics row_statistics = statistics(a, row), next = statistics(a, row + step);
    const auto take = [&](const Statistics& current_statistics) {
      stream.take(in);
      if (a.stages == 1) stream.release();  // as in walk()
      Parts parts;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        float g[VEC];
        weights.multiply(g, in[dy][k], k);
        add(sums, parts, k, g, vectors_at(in, k), current_statistics);
      }
      parts.total(row_sums);
      if (a.stages > 1) stream.release();
      forget_widened(in);
    };
    if (row < a.rows) take(row_statistics);
    if (row < a.rows && a.dz.data) group.begin_sum(row_sums);
    for (; row < a.rows; row += step, dz += step * a.dz.stride) {
      const Statistics current_statistics = row_statistics;
      RowSums current_sums;
      Inputs current;
      copy(current, in);
#pragma unroll
      for (int n = 0; n < (Centered ? 2 : 1); ++n) current_sums[n] = row_sums[n];
      const bool more = row + step < a.rows;
      if (more) {
        row_statistics = next;
        next = statistics(a, row + 2 * step);
        take(row_statistics);
      }
      if (a.dz.data == nullptr) continue;
      group.end_sum(current_sums);
      if (more) group.begin_sum(row_sums);
      const Gradient gradient(current_statistics, current_sums, a.inverse_cols);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        float g[VEC];
        weights.multiply(g, current[dy][k], k);
        if (columns.has(k)) store<Hint::stream>(dz + k * columns.step, gradient(g, vectors_at(current, k)));
      }
    }
    let_next_kernel_start();
    if (a.partial) sums.store(a, group, columns);
  }
  LIGER_DEVICE static void copy(Inputs& to, const Inputs& from) {
#pragma unroll
    for (int n = 0; n < inputs; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) to[n][k] = from[n][k];
  }

  // walk() with few registers. Each row is read twice, vector by vector: for its sums, and for dz. Both readings load the weights and
  // compute g.
  static LIGER_DEVICE void walk_with_few_registers(const Args& a) {
    static_assert(independent_rows);  // no thread has a row past the last one, which would need zeros
    using Stream = std::conditional_t<reads_twice, AsyncStream<Group, T, VEC, K, inputs>,
                                      HeldStream<RowStream<Group, T, VEC, K, inputs, 0, true>, T, VEC, K, inputs>>;
    Group group(a.threads_per_row);
    const Tile columns = warp_columns<VEC, K>(group, a.cols);
    const int64_t step = a.row_step;
    int64_t row = group.first_row();
    Stream stream(group, steps(a, row), a.stages, a.ring_offset);
    const Weights weights(a, columns);
    T* dz = opaque(static_cast<T*>(a.dz.data) + (row * a.dz.stride + columns.first));
    Sums sums;
    Statistics next = statistics(a, row);
    for (; row < a.rows; row += step, dz += step * a.dz.stride) {
      stream.wait();
      const Statistics row_statistics = next;
      next = statistics(a, row + step);
      Parts parts;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!columns.has(k)) continue;
        const InputVectors in = stream.vectors(k);
        float g[VEC];
        weights.multiply(g, in[dy], k);
        add(sums, parts, k, g, in, row_statistics);
      }
      RowSums row_sums;
      parts.total(row_sums);
      if (a.dz.data) group.sum(row_sums);
      stream.read_again();
      const Gradient gradient(row_statistics, row_sums, a.inverse_cols);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const InputVectors in = stream.vectors(k);
        stream.replace(k);
        if (a.dz.data == nullptr || !columns.has(k)) continue;
        float g[VEC];
        weights.multiply(g, in[dy], k);
        store<Hint::stream>(dz + k * columns.step, gradient(g, in));
      }
      stream.finish_row();
    }
    let_next_kernel_start();
    if (a.partial) sums.store(a, group, columns);
  }

  // The weights of a thread's columns, in registers if there are enough registers. Past the last column dy, z and the weight are 0, so that
  // the sums do not change.
  struct Weights {
    const Args& a;
    const Tile& columns;
    float held[has_few_registers ? 1 : K][VEC] = {};

    LIGER_DEVICE Weights(const Args& a, const Tile& columns) : a(a), columns(columns) {
      if constexpr (!has_few_registers)
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (columns.has(k)) load_weight(held[k], a, columns.first + k * columns.step);
    }
    // Computes g = dy * weight of vector k.
    LIGER_DEVICE void multiply(float (&g)[VEC], const Packed<T, VEC>& dy, int k) const {
      float weight[VEC] = {};
      if constexpr (has_few_registers)
        if (columns.has(k)) load_weight(weight, a, columns.first + k * columns.step);
#pragma unroll
      for (int i = 0; i < VEC; ++i) g[i] = dy[i] * (has_few_registers ? weight[i] : held[k][i]);
    }
  };
  // This thread's part of the sums over a row.
  struct Parts {
    float sums[Centered ? 2 : 1][2] = {};  // of even and of odd elements: two short chains of dependent additions
    LIGER_DEVICE void total(RowSums& out) const {
      out[0] = sums[0][0] + sums[0][1];
      if constexpr (Centered) out[1] = sums[1][0] + sums[1][1];
    }
  };
  // Adds vector k of a row to the sums over rows, and to the sums over the row's columns.
  LIGER_DEVICE static void add(Sums& sums, Parts& parts, int k, const float (&g)[VEC], const InputVectors& in,
                               const Statistics& row_statistics) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float n = normalized(in[z][i], row_statistics);
      sums.dweight[k][i] += in[dy][i] * n;
      parts.sums[0][i % 2] += g[i] * n;
      if constexpr (Centered) {
        sums.dbias[k][i] += in[dy][i];
        parts.sums[1][i % 2] += g[i];
      }
    }
  }

  // Returns (z - mean) * rstd. For 16-bit types it is one multiply-add, which rounds mean * rstd; but mean itself is rounded, too.
  static constexpr bool one_step = !Centered || sizeof(T) == 2;
  LIGER_DEVICE static float normalized(float z, const Statistics& row_statistics) {
    return !Centered  ? z * row_statistics.rstd
           : one_step ? z * row_statistics.rstd - row_statistics.mean * row_statistics.rstd
                      : (z - row_statistics.mean) * row_statistics.rstd;
  }
  // dz = rstd * (g - mean(g) - (z - mean) * rstd * mean(g * n)) as a function of g and z.
  struct Gradient {
    Statistics row_statistics;
    float from_n, from_g, constant;
    LIGER_DEVICE Gradient(const Statistics& row_statistics, const RowSums& sums, float inverse_cols)
        : row_statistics(row_statistics),
          from_n(row_statistics.rstd * row_statistics.rstd * (sums[0] * inverse_cols)),
          from_g(Centered ? row_statistics.rstd * (sums[Centered] * inverse_cols) : 0),
          constant(row_statistics.mean * from_n - from_g) {}
    LIGER_DEVICE float operator()(float g, float z) const {
      return row_statistics.rstd * g + (one_step ? constant - z * from_n : -(z - row_statistics.mean) * from_n - from_g);
    }
    // dz of a vector, plus dsum.
    LIGER_DEVICE Packed<T, VEC> operator()(const float (&g)[VEC], const InputVectors& in) const {
      float out[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        out[i] = (*this)(g[i], in[z][i]);
        if constexpr (Residual) out[i] += in[dsum][i];
      }
      Packed<T, VEC> packed;
      packed.set(out);
      return packed;
    }
  };

  // Returns the end of this thread's rows. Threads that meet at a shuffle or a barrier must execute the same number of iterations. With
  // independent_rows these are the threads of a row. Otherwise they are all threads of the block: its first row decides, and its other rows
  // may be past the last one.
  LIGER_DEVICE static int64_t row_end(int64_t rows, const Group& group) { return independent_rows ? rows : rows + group.row_in_block; }
  LIGER_DEVICE static RowSteps<inputs> steps(const Args& a, int64_t row) {
    if constexpr (Residual) return {row, a.row_step, a.rows, a.cols, {a.dy, a.z, a.dsum}};
    else return {row, a.row_step, a.rows, a.cols, {a.dy, a.z}};
  }
  LIGER_DEVICE static Statistics statistics(const Args& a, int64_t row) {
    return {Centered && row < a.rows ? a.mean[row] : 0, row < a.rows ? a.rstd[row] : 0};
  }
  LIGER_DEVICE static void clear(Inputs& in) {
#pragma unroll
    for (int n = 0; n < inputs; ++n)
#pragma unroll
      for (int k = 0; k < K; ++k) in[n][k] = {};
  }
  // Otherwise the compiler would keep the widened values of a row in registers while its sums are computed.
  LIGER_DEVICE static void forget_widened(Inputs& in) {
#pragma unroll
    for (int k = 0; k < K; ++k) forget(in[z][k].data);
  }
};

}  // namespace liger::gpu
