// Decodes 4-bit weights. Bound by memory: half a byte is read and one element written for each value, each once. A thread loads the packed
// values and scales of K vectors of the output before it uses the first one. Vectors of one scale are as close together as whole sectors of
// stores allow: reading the scale for each vector took 15 % longer on an H200. The codes are in shared memory: its 16 words are in
// different banks, so any lanes read any codes at once.
#include "kernels/dequantize_4bit.h"

#include "gpu/device.h"
#include "gpu/tiles.h"
#include "launch/dequantize_4bit.h"

namespace liger::gpu {
namespace {

template <class T, int VEC> struct Dequantize4bitKernel {
  struct Args {
    Tiles tiles;
    Dequantize4bit op;
    Codes4bit codes;
    int shift, absmax_shift;
    bool one_scale;  // for all vectors of a thread
  };
  static constexpr int K = launch::dequantize_4bit_k(VEC), max_threads = launch::dequantize_4bit_kernel.instance(VEC).max_threads;

  LIGER_DEVICE static float scale(const Args& a, int64_t block) {
    if (a.op.absmax_code == nullptr) return static_cast<const float*>(a.op.absmax)[block];
    const float code = a.op.absmax_code[static_cast<const uint8_t*>(a.op.absmax)[block]];
    return rounded_product(code, a.op.absmax_scales[block >> a.absmax_shift]) + *a.op.absmax_offset;
  }
  static LIGER_DEVICE void run(const Args& a) {
    const Shared<float> codes = shared<float>(0);
    if (thread_id() < 16) codes[thread_id()] = a.codes.values[thread_id()];
    const Tile<VEC, K> tile(a.tiles);
    const auto columns = VEC == 1 ? tile.columns() : tile.columns(launch::dequantize_4bit_lanes);
    const int64_t first = tile.row * a.op.cols;  // the number of the row's first value
    Vec<uint8_t, VEC == 1 ? 1 : VEC / 2> packed[K];
    float scales[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      const int64_t at = first + columns.first + k * columns.step;
      load(packed[k], a.op.packed + at / 2);
      scales[k] = k > 0 && a.one_scale ? scales[0] : scale(a, at >> a.shift);
    }
    block_barrier();
    Packed<T, VEC> out[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      const int odd = VEC == 1 ? int(first + columns.first + k * columns.step) & 1 : 0;
      float values[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) values[i] = rounded_product(codes[packed[k][i / 2] >> (4 - 4 * ((i | odd) & 1)) & 15], scales[k]);
      out[k].set(values);
    }
    columns.store(out, a.op.out.data, tile.row * a.op.out.stride);  // no hint: a matmul reads the weight next
  }
};

}  // namespace

void dequantize_4bit(const Dequantize4bit& a, Stream stream) {
  const launch::Launch config = launch::op_launch(device_profile(stream.device), a);
  const bool one_scale = config.instance.vec > 1 && a.blocksize >= 64 && (a.rows == 1 || a.cols % 64 == 0);
  dispatch(a.out.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_instance<launch::dequantize_4bit_kernel, fits<T>>(config, [&]<Instance I>() {
      launch<Dequantize4bitKernel<T, I.vec>>(config, {Tiles(config), a, a.codes(), a.shift(), a.absmax_shift(), one_scale}, stream);
    });
  });
}

}  // namespace liger::gpu
