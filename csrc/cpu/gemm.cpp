// Matrix products with torch's CPU GEMM, called through torch's C shim. The shim calls at::cpu:: directly: no dispatcher, no autograd and
// no autocast runs.
//
// fp32 and fp64 operands take one call of torch's GEMM. The speed of 16-bit operands depends on the CPU. If the CPU multiplies bf16 or fp16
// in hardware, torch's GEMM of that type is faster than torch's fp32 GEMM; if not, it is slower by orders of magnitude
// (docs/measurements.md). So there are three strategies:
//   direct   The CPU multiplies the type in hardware, and C has the operands' type: one call, or a few (with_padded_rows).
//   split    The CPU multiplies bf16 in hardware, and C is fp32. For each tile of C, a first call rounds the product A B to bf16; a second
//            call computes the rounding error, A B minus the rounded product, also in bf16. The two bf16 numbers together have 16 bits of
//            mantissa. Their sum is stored in C, or added to C, in fp32.
//   widen    All other cases: the CPU does not multiply the type in hardware; or the operands are fp16 and C is fp32, since a product may
//            leave fp16's range; or the caller sets all_bits (kernels/gemm.h) for a C with the full precision of fp32. Tiles of the
//            operands are converted to fp32 and multiplied in fp32. A 16-bit C is rounded once, after the sum over all of k.
// The strategy follows from the types, all_bits and the selected instruction set, not from a timing, so that the same input has the same
// bits in every run. Only with avx512 (cpu/dispatch.h) does a CPU count as one that multiplies 16-bit types in hardware.
#include "kernels/gemm.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "cpu/dispatch.h"
#include "kernels/errors.h"

namespace liger::cpu {
namespace {

constexpr int64_t tile_size = 2048;  // at most three tiles of scratch: 48 MiB in fp32

bool hardware_multiplies(Dtype dtype) {
#if defined(__x86_64__)
  static const auto [bf16, f16] = [] {
    unsigned a, b, c, d;
    const bool f16 = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);  // AVX512-FP16
    const bool bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);  // AVX512-BF16; every CPU with AMX has it
    return std::pair(bf16, f16);
  }();
  if (isa() == Isa::avx512) return dtype == Dtype::bf16 ? bf16 : dtype == Dtype::f16 ? f16 : true;
#endif
  return dtype == Dtype::f32 || dtype == Dtype::f64;
}

int32_t torch_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return aoti_torch_dtype_float32();
    case Dtype::bf16:
      return aoti_torch_dtype_bfloat16();
    case Dtype::f16:
      return aoti_torch_dtype_float16();
    case Dtype::f64:
      return aoti_torch_dtype_float64();
  }
  return -1;
}

void check(AOTITorchError error, const char* what) {
  if (error == AOTI_TORCH_SUCCESS) return;
  const std::string cause = torch_error_text();
  if (is_memory_error(cause)) throw OutOfMemory(text("out of memory: liger_ext's matrix product; torch: ", cause));
  throw std::runtime_error(text("liger_ext's matrix product: ", what, " failed: ", cause.empty() ? "torch has printed the reason" : cause));
}

// op(X) as a torch tensor over its memory.
class Operand {
 public:
  Operand(const Matrix& x, int64_t rows, int64_t cols) {
    const int64_t sizes[] = {rows, cols};
    const int64_t strides[] = {x.transposed ? 1 : x.stride, x.transposed ? x.stride : 1};
    check(aoti_torch_create_tensor_from_blob(const_cast<void*>(x.data), 2, sizes, strides, 0, torch_dtype(x.dtype),
                                             aoti_torch_device_type_cpu(), 0, &handle_),
          "aoti_torch_create_tensor_from_blob");
  }
  ~Operand() { aoti_torch_delete_tensor_object(handle_); }
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;
  operator AtenTensorHandle() const { return handle_; }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// out = alpha * a b + beta * self; with beta == 0, self is not read.
void addmm(const Operand& out, const Operand& self, const Operand& a, const Operand& b, double beta, double alpha) {
  check(aoti_torch_cpu_addmm_out(out, self, a, b, beta, alpha), "aoti_torch_cpu_addmm_out");
}

// Converts `from` to the dtype of `to`. rows, cols: of the stored matrices, before any transposition.
void convert(const Matrix& from, const Matrix& to, int64_t rows, int64_t cols) {
  scale_cast({rows, cols, {from.data, from.stride, from.dtype}, {const_cast<void*>(to.data), to.stride, to.dtype}, nullptr, {}}, {});
}

// One fp32 tile of a 16-bit matrix at a time. A request for the tile that it holds converts nothing.
class WidenedTiles {
 public:
  WidenedTiles(const Matrix& source, int64_t rows, int64_t cols)
      : source_(source), scratch_(std::make_unique_for_overwrite<float[]>(std::min(rows, tile_size) * std::min(cols, tile_size))) {}

  Matrix tile(int64_t row, int64_t col, int64_t rows, int64_t cols) {
    const int64_t stored_rows = source_.transposed ? cols : rows, stored_cols = source_.transposed ? rows : cols;
    const Matrix wide{scratch_.get(), stored_cols, Dtype::f32, source_.transposed};
    if (row != row_ || col != col_) {
      convert(tile_at(source_, row, col), wide, stored_rows, stored_cols);
      row_ = row, col_ = col;
    }
    return wide;
  }

 private:
  Matrix source_;
  std::unique_ptr<float[]> scratch_;
  int64_t row_ = -1, col_ = -1;
};

// Calls f(row, col, rows, cols) for every tile of an m x n matrix.
template <class F> void for_each_tile(int64_t m, int64_t n, const F& f) {
  for (int64_t col = 0; col < n; col += tile_size)
    for (int64_t row = 0; row < m; row += tile_size) f(row, col, std::min(tile_size, m - row), std::min(tile_size, n - col));
}

void gemm_widen(const Gemm& g, const Matrix& c, double alpha) {
  const bool rounds = c.dtype != Dtype::f32;
  WidenedTiles a(g.a, g.m, g.k), b(g.b, g.k, g.n);
  const auto product = rounds ? std::make_unique_for_overwrite<float[]>(std::min(g.m, tile_size) * std::min(g.n, tile_size)) : nullptr;
  for_each_tile(g.m, g.n, [&](int64_t row, int64_t col, int64_t rows, int64_t cols) {
    const Matrix target = tile_at(c, row, col);
    const Matrix sum = rounds ? Matrix{product.get(), cols, Dtype::f32, false} : target;
    if (rounds && g.accumulate) convert(target, sum, rows, cols);
    const Operand out(sum, rows, cols);
    for (int64_t k = 0; k < std::max<int64_t>(g.k, 1); k += tile_size) {
      const int64_t depth = std::min(tile_size, g.k - k);
      const Operand left(a.tile(row, k, rows, depth), rows, depth), right(b.tile(k, col, depth, cols), depth, cols);
      addmm(out, out, left, right, k > 0 || g.accumulate ? 1 : 0, alpha);
    }
    if (rounds) convert(sum, target, rows, cols);
  });
}

float widened(uint16_t bf16) { return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16); }

void gemm_split(const Gemm& g, const Matrix& c, double alpha) {
  const int64_t scratch = std::min(g.m, tile_size) * std::min(g.n, tile_size);
  const auto high = std::make_unique_for_overwrite<uint16_t[]>(scratch), low = std::make_unique_for_overwrite<uint16_t[]>(scratch);
  for_each_tile(g.m, g.n, [&](int64_t row, int64_t col, int64_t rows, int64_t cols) {
    const Operand a(tile_at(g.a, row, 0), rows, g.k), b(tile_at(g.b, 0, col), g.k, cols);
    const Operand rounded({high.get(), cols, Dtype::bf16, false}, rows, cols), rest({low.get(), cols, Dtype::bf16, false}, rows, cols);
    addmm(rounded, rounded, a, b, 0, alpha);
    addmm(rest, rounded, a, b, -1, alpha);
    const Matrix target = tile_at(c, row, col);
    torch::stable::parallel_for(0, rows, std::max<int64_t>(1, (1 << 15) / cols), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* out = static_cast<float*>(const_cast<void*>(target.data)) + i * target.stride;
        for (int64_t j = 0; j < cols; ++j) {
          const float whole = widened(high[i * cols + j]), part = widened(low[i * cols + j]);
          // An infinite product has no remainder: inf - inf is NaN.
          const float sum = std::isfinite(whole) ? whole + part : whole;
          out[j] = g.accumulate ? out[j] + sum : sum;
        }
      }
    });
  });
}

// For 16-bit products in hardware: calls f(g), or f for some rows at a time, with A copied to rows that end in zeros. oneDNN's kernels for
// AMX (3.12, in torch 2.13) load the rows of A up to the next multiple of 32 columns, and multiply the elements behind the last column by
// zero. If one of them is NaN or infinite, in the next row or in uninitialised memory, the result is NaN.
template <class F> void with_padded_rows(const Gemm& g, const F& f) {
  constexpr int64_t multiple = 32, scratch_size = 1 << 24;
  if (g.a.transposed || g.k % multiple == 0) return f(g);
  const int64_t stride = (g.k / multiple + 1) * multiple, most = std::clamp<int64_t>(scratch_size / stride, 1, g.m);
  const auto scratch = std::make_unique<uint16_t[]>(most * stride);
  for (int64_t row = 0; row < g.m; row += most) {
    Gemm part = g;
    part.m = std::min(most, g.m - row);
    part.a = {scratch.get(), stride, g.a.dtype, false};
    part.c = static_cast<char*>(g.c) + row * g.c_stride * dtype_bytes(g.c_dtype);
    convert(tile_at(g.a, row, 0), part.a, part.m, g.k);
    f(part);
  }
}

}  // namespace

void gemm(const Gemm& g, Stream stream) {
  if (g.m == 0 || g.n == 0) return;
  if (g.bias) return gemm(with_bias_in_c(g, stream), stream);
  const double alpha = !g.alpha ? 1 : g.a.dtype == Dtype::f64 ? *static_cast<const double*>(g.alpha) : *static_cast<const float*>(g.alpha);
  const bool narrow = dtype_bytes(g.a.dtype) == 2, direct = hardware_multiplies(g.a.dtype) && g.c_dtype == g.a.dtype;
  const bool split = hardware_multiplies(g.a.dtype) && !direct && g.a.dtype == Dtype::bf16 && !g.all_bits;
  const auto multiply = [&](const Gemm& part) {
    const Matrix c{part.c, part.c_stride, part.c_dtype, false};
    if (!direct) return split ? gemm_split(part, c, alpha) : gemm_widen(part, c, alpha);
    const Operand out(c, part.m, part.n), a(part.a, part.m, part.k), b(part.b, part.k, part.n);
    addmm(out, out, a, b, part.accumulate ? 1 : 0, alpha);
  };
  if (narrow && (direct || split)) with_padded_rows(g, multiply);
  else multiply(g);
}

}  // namespace liger::cpu
