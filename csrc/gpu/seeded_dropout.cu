// Dropout with a seed, of one matrix with several masks, or of several matrices, added to another one. Bound by memory: each element of all
// of these is read or written once. A thread issues the loads of a matrix before it uses the values of the one before. A vector has eight
// elements of any dtype, which take one call of Philox; in rows that are not aligned each element takes a call.
#include "kernels/seeded_dropout.h"

#include "gpu/device.h"
#include "gpu/tiles.h"
#include "launch/seeded_dropout.h"
#include "math/philox.h"

namespace liger::gpu {
namespace {

struct Arithmetic {
  static LIGER_DEVICE void product(uint32_t m, uint32_t v, uint32_t& high, uint32_t& low) {
    const uint64_t wide = uint64_t{m} * v;
    high = uint32_t(wide >> 32);
    low = uint32_t(wide);
  }
};

template <class T, int VEC, bool Add> struct SeededDropoutKernel {
  struct Args {
    Tiles tiles;
    SeededDropout op;
  };
  static constexpr int K = launch::seeded_dropout_k, max_threads = launch::seeded_dropout_kernel.instance(VEC).max_threads;

  static LIGER_DEVICE void run(const Args& a) {
    const Tile<VEC, K> tile(a.tiles);
    const auto columns = tile.columns();
    const int64_t row = tile.row;
    const auto seed = uint64_t(*a.op.seed);
    Packed<T, VEC> x[K];
    columns.template load<Hint::stream>(x, a.op.x.data, row * a.op.x.stride);
    if constexpr (!Add) {
      for (int64_t mask = 0; mask < a.op.count; ++mask) {
        float dropped[K][VEC] = {};
        add(dropped, a.op, row, columns, x, mask, seed);
        store<T>(dropped, a.op, columns, mask * a.op.rows + row);
      }
    } else
      with_dtype(a.op.out.dtype, [&](auto tag) {
        using Out = std::remove_cvref_t<decltype(tag)>;
        Packed<Out, VEC> before[K];
        columns.template load<Hint::in_place>(before, a.op.out.data, row * a.op.out.stride);
        float total[K][VEC];
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
          for (int i = 0; i < VEC; ++i) total[k][i] = before[k][i];
        for (int64_t mask = 0; mask < a.op.count; ++mask) {
          Packed<T, VEC> next[K] = {};
          const int64_t below = (mask + 1) * a.op.rows + row;
          if (mask + 1 < a.op.count) columns.template load<Hint::stream>(next, a.op.x.data, below * a.op.x.stride);
          add(total, a.op, row, columns, x, mask, seed);
#pragma unroll
          for (int k = 0; k < K; ++k) x[k] = next[k];
        }
        store<Out>(total, a.op, columns, row);
      });
  }

 private:
  template <class Out>
  static LIGER_DEVICE void store(const float (&values)[K][VEC], const SeededDropout& a, const Columns<VEC, K>& columns, int64_t row) {
    Packed<Out, VEC> out[K];
#pragma unroll
    for (int k = 0; k < K; ++k) out[k].set(values[k]);
    columns.template store<Hint::stream>(out, a.out.data, row * a.out.stride);
  }
  // Adds the dropout of x with one mask.
  static LIGER_DEVICE void add(float (&total)[K][VEC], const SeededDropout& a, int64_t row, const Columns<VEC, K>& columns,
                               const Packed<T, VEC> (&x)[K], int64_t mask, uint64_t seed) {
    const float scale = float(a.scale);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      const int64_t column = columns.first + k * columns.step;
      uint32_t words[4];
      math::dropout_numbers<Arithmetic>(words, uint32_t(column / 8), uint64_t(a.first_row + row), a.stream + uint32_t(mask), seed);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const uint32_t number = VEC == 1 ? single(words, int(column % 8)) : words[i / 2 % 4] >> (i % 2 * 16) & 0xffff;
        total[k][i] += number >= a.threshold ? rounded_product(x[k][i], scale) : 0.f;
      }
    }
  }
  // The number of one column, without an array in memory.
  static LIGER_DEVICE uint32_t single(const uint32_t (&words)[4], int i) {
    const uint32_t low = i & 2 ? words[1] : words[0], high = i & 2 ? words[3] : words[2];
    return (i & 4 ? high : low) >> (i % 2 * 16) & 0xffff;
  }
};

}  // namespace

void seeded_dropout(const SeededDropout& a, Stream stream) {
  const launch::Launch config = launch::op_launch(device_profile(stream.device), a);
  dispatch(a.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_instance<launch::seeded_dropout_kernel>(config, [&]<Instance I>() {
      if (a.add) launch<SeededDropoutKernel<T, I.vec, true>>(config, {Tiles(config), a}, stream);
      else launch<SeededDropoutKernel<T, I.vec, false>>(config, {Tiles(config), a}, stream);
    });
  });
}

}  // namespace liger::gpu
