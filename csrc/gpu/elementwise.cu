// The small passes between the fused loss's matmuls. All but scalar_product are bound by memory: they access each element of a matrix once,
// in vectors of eight elements (single elements where rows are not aligned), and each thread has several loads in flight.
//
// scale_cast, fill_rows: tiles of rows (tiles.h). column_sum: a thread owns a vector of columns and a range of rows. The sums over a range
// of rows are an fp32 partial row, and column_sum.h adds up the partial rows. scalar_product: one block.
#include "gpu/column_sum.h"
#include "gpu/device.h"
#include "gpu/tiles.h"
#include "launch/arguments.h"

namespace liger::gpu {
namespace {

constexpr int width = launch::matrix_vec;  // elements of a vector, of any dtype
constexpr int in_flight = launch::matrix_k;  // vectors that a thread reads before it uses the first one

template <class T, int N> struct Scale {
  struct Args {
    Tiles tiles;
    Rows in;
    MutableRows out;
    const float* scale;
    Rows row_scale;
  };
  static constexpr int max_threads = launch::scale_kernel.instance(N).max_threads;

  static LIGER_DEVICE void run(const Args& a) {
    const Tile<N, in_flight> tile(a.tiles);
    if (!tile.live()) return;
    const RowTile<N, in_flight> part = tile.part(0);
    TileValues<T, N, in_flight> x;
    part.template load<Hint::in_place>(x, static_cast<const T*>(a.in.data) + tile.row * a.in.stride);
    float factor = a.scale ? *a.scale : 1.f;
    if (a.row_scale.data) factor *= load_one(a.row_scale.data, a.row_scale.dtype, tile.row * a.row_scale.stride);
    with_dtype(a.out.dtype, [&](auto tag) {
      using Out = std::remove_cvref_t<decltype(tag)>;
      Out* const out = opaque(static_cast<Out*>(a.out.data) + tile.row * a.out.stride);
      part.for_each(
          [&]<int M>(const Packed<T, M>& in, int64_t column) {
            float values[M];
#pragma unroll
            for (int j = 0; j < M; ++j) values[j] = in[j] * factor;
            Packed<Out, M> scaled;
            scaled.set(values);
            store<Hint::stream>(out + column, scaled);
          },
          x);
    });
  }
};

template <class T, int N> struct Fill {
  struct Args {
    Tiles tiles;
    MutableRows matrix;
    Vector values;
  };
  static constexpr int max_threads = launch::fill_kernel.instance(N).max_threads;

  static LIGER_DEVICE void run(const Args& a) {
    const Tile<N, in_flight> tile(a.tiles);
    if (!tile.live()) return;
    T* const row = opaque(static_cast<T*>(a.matrix.data) + tile.row * a.matrix.stride);
    TileValues<T, N, in_flight> same;
    tile.part(0).for_each(
        [&]<int M>(Packed<T, M>& out, int64_t column) {
          float values[M];
          load_any<M>(values, a.values.data, a.values.dtype, column);
          out.set(values);
          store(row + column, out);
        },
        same);
  }
};

// Partial row `part` is the sum of up to rows_per_part rows from row part * rows_per_part on. Columns behind the last whole vector are
// vectors of one.
template <class T, int N> struct PartialColumns {
  struct Args {
    int64_t rows, cols, rows_per_part, blocks_per_part;
    Rows in, row_scale;
    float* partial;  // [parts, stride]
    int64_t stride;
  };
  static constexpr int max_threads = launch::partial_columns_kernel.instance(N).max_threads;

  static LIGER_DEVICE void run(const Args& a) {
    const int64_t part = quotient(block_id(), a.blocks_per_part), block = block_id() - part * a.blocks_per_part;
    const int64_t owner = block * block_threads() + thread_id(), vectors = a.cols / N, behind = vectors * N + owner - vectors;
    const int64_t begin = part * a.rows_per_part, end = begin + a.rows_per_part < a.rows ? begin + a.rows_per_part : a.rows;
    if (owner < vectors) sum<N>(a, owner * N, begin, end, a.partial + part * a.stride);
    else if (behind < a.cols) sum<1>(a, behind, begin, end, a.partial + part * a.stride);
  }

 private:
  template <int M> static LIGER_DEVICE void sum(const Args& a, int64_t column, int64_t begin, int64_t end, float* out) {
    const T* in = static_cast<const T*>(a.in.data) + column;
    float total[M] = {};
    for (int64_t row = begin; row < end; row += in_flight) {
      Packed<T, M> raw[in_flight];
#pragma unroll
      for (int k = 0; k < in_flight; ++k)
        if (row + k < end) load<Hint::stream>(raw[k], in + (row + k) * a.in.stride);
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        if (row + k >= end) continue;
        const float factor = a.row_scale.data ? load_one(a.row_scale.data, a.row_scale.dtype, (row + k) * a.row_scale.stride) : 1.f;
#pragma unroll
        for (int j = 0; j < M; ++j) total[j] += factor * raw[k][j];
      }
    }
    Packed<float, M> packed;
    packed.set(total);
    store(out + column, packed);
  }
};

// The kernel of scalar_product(), launched as one block.
struct Product {
  struct Args {
    Vector a;
    const float* b;
    float scale;
    float* out;
    Rows factors;
    int64_t rows;
  };
  static constexpr int max_threads = launch::product_kernel.instance().max_threads;

  static LIGER_DEVICE void run(const Args& args) {
    float largest = 0;
    if (args.factors.data)
      for (int64_t row = thread_id(); row < args.rows; row += block_threads())
        largest = fmaxf(largest, fabsf(load_one(args.factors.data, args.factors.dtype, row * args.factors.stride)));
    RowGroup group(block_threads());
    largest = group.max(largest);
    if (thread_id() != 0) return;
    float product = args.scale;
    if (args.a.data) product *= load_one(args.a.data, args.a.dtype, 0);
    if (args.b) product *= *args.b;
    args.out[0] = product;
    if (!args.factors.data) return;
    // The exponent of the smallest power of two that is not below `largest`: its own, or one more if the mantissa is not 0.
    const uint32_t bits = bit_cast<uint32_t>(largest);
    const int exponent = int(bits >> 23), bias = 127, above = exponent + ((bits & 0x7fffffu) != 0) - bias;
    const int power = largest == 0 || exponent == 255 ? 0 : above < -100 ? -100 : above > 100 ? 100 : above;
    args.out[1] = product * bit_cast<float>(uint32_t(bias + power) << 23);
    args.out[2] = bit_cast<float>(uint32_t(bias - power) << 23);
  }
};

}  // namespace

void scale_cast(const ScaleCast& op, Stream stream) {
  if (op.rows == 0 || op.cols == 0) return;
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  dispatch(op.in.dtype, [&](auto tag) {
    with_instance<launch::scale_kernel>(config, [&]<Instance I>() {
      launch<Scale<decltype(tag), I.vec>>(config, {Tiles(config), op.in, op.out, static_cast<const float*>(op.scale), op.row_scale},
                                          stream);
    });
  });
}

void fill_rows(const FillRows& op, Stream stream) {
  if (op.rows == 0 || op.cols == 0) return;
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  dispatch(op.matrix.dtype, [&](auto tag) {
    with_instance<launch::fill_kernel>(
        config, [&]<Instance I>() { launch<Fill<decltype(tag), I.vec>>(config, {Tiles(config), op.matrix, op.values}, stream); });
  });
}

int64_t column_sum_workspace(const ColumnSum& op, Stream stream) { return launch::workspace_bytes(device_profile(stream.device), op); }

void column_sum(const ColumnSum& op, Stream stream) {
  auto* partial = static_cast<float*>(op.workspace);
  const int64_t stride = launch::round_up(op.cols, width);
  for (const launch::Launch& config : launch::op_launches(device_profile(stream.device), op)) {
    const int64_t parts = config.plan.partial_rows;
    if (config.is(launch::sum_columns_kernel)) {
      sum_columns(config, {partial, config.rows, stride}, {{0, op.cols, {op.sum, Dtype::f32}, op.accumulate}, {}}, stream);
      continue;
    }
    dispatch(op.in.dtype, [&](auto tag) {
      with_instance<launch::partial_columns_kernel>(config, [&]<Instance I>() {
        launch<PartialColumns<decltype(tag), I.vec>>(
            config, {op.rows, op.cols, launch::ceil_div(op.rows, parts), config.plan.grid / parts, op.in, op.row_scale, partial, stride},
            stream);
      });
    });
  }
}

void scalar_product(const ScalarProduct& op, Stream stream) {
  const launch::Launch config = launch::op_launch(device_profile(stream.device), op);
  launch<Product>(config, {op.a, static_cast<const float*>(op.b), float(op.scale), static_cast<float*>(op.out), op.factors, op.rows},
                  stream);
}

}  // namespace liger::gpu
