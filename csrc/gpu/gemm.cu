// Matrix products with cuBLAS or hipBLAS: the library that torch has loaded, called with torch's own handle. The handle is bound to the
// current stream, and has torch's workspace and math mode, so that fp32 products follow torch's TF32 setting.
//
// The library's matrices are column-major, ours are row-major. A row-major C = A B is, in the same memory, the column-major C' = B' A': so
// A and B are swapped. Sums are fp32 for all operands, also where the library splits k. If alpha is in device memory (a loss scale that the
// host has not read), the library also reads beta from device memory: device_beta. Nothing synchronises or allocates device memory, so
// calls can be captured in a CUDA graph.
//
// With a bias, an fp32 C is first filled with the bias, and the product is added to it. A 16-bit C would be rounded twice in this way,
// because cuBLAS rounds the product before the addition. So for a 16-bit C cublasLt, if it has an algorithm for the product, adds the bias
// in its epilogue, in fp32. cublasLt receives no workspace, since the workspace of torch's handle belongs to cuBLAS: so it never splits k.
//
// If a dimension along which a 16-bit matrix is contiguous is no multiple of 8 (an odd vocabulary size), cuBLAS selects kernels for
// unaligned matrices, whatever the stride. They are several times slower (docs/measurements.md). So split() divides most such products
// along this dimension, if it is long, into two products: for a multiple of 8, and for the remainder.
#include <algorithm>
#include <limits>

#include "gpu/platform_blas.h"
#include "gpu/symbols.h"
#include "kernels/gemm.h"

extern "C" int32_t torch_get_current_cuda_blas_handle(void** handle);

namespace liger::gpu {
namespace {

// Not const: clang removes a constant that no kernel uses from HIP's device code, and the runtime would not find it.
__device__ float device_beta[2] = {0, 1};

template <class F, class Names> F find(const void* neighbour, const Names& names) {
  for (const char* name : names)
    if (void* symbol = find_symbol(neighbour, name)) return reinterpret_cast<F>(symbol);
  return nullptr;
}
template <class F> const void* address(F* function) { return reinterpret_cast<const void*>(function); }

// cublasLt, to which cuBLAS is linked. The functions are looked up next to `neighbour`, a function of cuBLAS. If any of them is missing, as
// with hipBLAS, none is used.
struct LtLibrary {
  const void* neighbour;
  blas::LtCreateMatmul create_matmul = find<blas::LtCreateMatmul>(neighbour, blas::lt_create_matmul_names);
  blas::LtCreateLayout create_layout = find<blas::LtCreateLayout>(neighbour, blas::lt_create_layout_names);
  blas::LtCreatePreference create_preference = find<blas::LtCreatePreference>(neighbour, blas::lt_create_preference_names);
  blas::LtDestroy destroy_matmul = find<blas::LtDestroy>(neighbour, blas::lt_destroy_matmul_names);
  blas::LtDestroy destroy_layout = find<blas::LtDestroy>(neighbour, blas::lt_destroy_layout_names);
  blas::LtDestroy destroy_preference = find<blas::LtDestroy>(neighbour, blas::lt_destroy_preference_names);
  blas::LtSetAttribute set_matmul = find<blas::LtSetAttribute>(neighbour, blas::lt_set_matmul_names);
  blas::LtSetAttribute set_preference = find<blas::LtSetAttribute>(neighbour, blas::lt_set_preference_names);
  blas::LtFindAlgorithm find_algorithm = find<blas::LtFindAlgorithm>(neighbour, blas::lt_find_algorithm_names);
  blas::LtMatmul matmul = find<blas::LtMatmul>(neighbour, blas::lt_matmul_names);

  explicit operator bool() const {
    return create_matmul && create_layout && create_preference && destroy_matmul && destroy_layout && destroy_preference && set_matmul &&
           set_preference && find_algorithm && matmul;
  }
};

// The functions of one library: the library that torch is linked to or, if that look-up fails, the first one in the process.
struct Library {
  blas::GemmEx<int> gemm = find<blas::GemmEx<int>>(address(&torch_get_current_cuda_blas_handle), blas::gemm_names);
  blas::GemmEx<int64_t> gemm_64 = nullptr;  // may be missing
  blas::GetPointerMode get_pointer_mode = nullptr;
  blas::SetPointerMode set_pointer_mode = nullptr;
  blas::GetMathMode get_math_mode = nullptr;  // null with hipBLAS
  blas::SetMathMode set_math_mode = nullptr;

  Library() {
    if (!gemm) gemm = find<blas::GemmEx<int>>(nullptr, blas::gemm_names);
    if (gemm) {
      gemm_64 = find<blas::GemmEx<int64_t>>(address(gemm), blas::gemm_64_names);
      get_pointer_mode = find<blas::GetPointerMode>(address(gemm), blas::get_pointer_mode_names);
      set_pointer_mode = find<blas::SetPointerMode>(address(gemm), blas::set_pointer_mode_names);
      get_math_mode = find<blas::GetMathMode>(address(gemm), blas::get_math_mode_names);
      set_math_mode = find<blas::SetMathMode>(address(gemm), blas::set_math_mode_names);
    }
    if (!gemm || !get_pointer_mode || !set_pointer_mode)
      throw std::runtime_error(text(
          blas::library, " was not found in this process: liger_ext uses the one that torch loads; is this torch built for this GPU?"));
  }
};

void check(int status, const char* what) {
  if (status != 0) throw std::runtime_error(text(blas::library, " failed with status ", status, " while ", what));
}

// Changes one of the handle's modes, and restores it in the destructor. Does nothing if the library has no functions for the mode.
class ModeGuard {
 public:
  using Get = int (*)(blas::Handle, int*);
  using Set = int (*)(blas::Handle, int);

  template <class Change> ModeGuard(blas::Handle handle, Get get, Set set, Change change) : handle_(handle), set_(set) {
    if (!get || !set) return;
    check(get(handle, &before_), "reading a mode");
    const int mode = change(before_);
    changed_ = mode != before_;
    if (changed_) check(set(handle, mode), "setting a mode");
  }
  ModeGuard(const ModeGuard&) = delete;
  ~ModeGuard() {
    if (changed_) set_(handle_, before_);
  }

 private:
  blas::Handle handle_;
  Set set_;
  int before_ = 0;
  bool changed_ = false;
};

int blas_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return blas::real_f32;
    case Dtype::f16:
      return blas::real_f16;
    case Dtype::bf16:
      return blas::real_bf16;
    case Dtype::f64:
      break;
  }
  throw_unsupported_dtype();
}

// Returns the stride as the library requires it: at least the length of a row. A matrix of one row may have any stride. The library does
// not accept rows that overlap.
int64_t leading_dimension(int64_t stride, int64_t rows, int64_t cols) {
  require(rows <= 1 || stride >= cols, "gemm: rows of ", cols, " elements with a stride of ", stride, " overlap");
  return std::max({stride, cols, int64_t{1}});
}

// Returns the leading dimension of x; rows and cols are the size of op(x).
int64_t leading_dimension(const Matrix& x, int64_t rows, int64_t cols) {
  return x.transposed ? leading_dimension(x.stride, cols, rows) : leading_dimension(x.stride, rows, cols);
}
int transposition(const Matrix& x) { return x.transposed ? blas::transpose : blas::normal; }

// A descriptor of cublasLt. It exists until the product is queued; null if its creation failed.
class Descriptor {
 public:
  template <class Create, class... Args> Descriptor(blas::LtDestroy destroy, Create create, Args... args) : destroy_(destroy) {
    if (create(&descriptor_, args...) != 0) descriptor_ = nullptr;
  }
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (descriptor_) destroy_(descriptor_);
  }
  operator blas::Descriptor() const { return descriptor_; }

 private:
  blas::LtDestroy destroy_;
  blas::Descriptor descriptor_ = nullptr;
};

uint32_t alignment(const void* data) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(data) | 256;
  return uint32_t(bits & -bits);
}

// Queues a product of 16-bit matrices with a bias. Returns false if cublasLt has not computed it: mostly because there is none, C is fp32,
// or it has no algorithm for this product.
bool gemm_with_bias(const LtLibrary& lt, blas::Handle handle, const Gemm& op, Stream stream) {
  if (!lt || dtype_bytes(op.c_dtype) != 2 || op.k == 0) return false;
  const int type = blas_type(op.c_dtype);
  const auto layout = [&](const Matrix& x, int64_t rows, int64_t cols) {
    return Descriptor(lt.destroy_layout, lt.create_layout, type, uint64_t(x.transposed ? rows : cols), uint64_t(x.transposed ? cols : rows),
                      leading_dimension(x, rows, cols));
  };
  const Descriptor a = layout(op.b, op.k, op.n), b = layout(op.a, op.m, op.k),
                   c = layout({op.c, op.c_stride, op.c_dtype, false}, op.m, op.n),
                   matmul(lt.destroy_matmul, lt.create_matmul, blas::compute_f32, blas::real_f32),
                   preference(lt.destroy_preference, lt.create_preference);
  if (!a || !b || !c || !matmul || !preference) return false;
  const auto set = [](blas::LtSetAttribute function, blas::Descriptor descriptor, int attribute, auto value) {
    return function(descriptor, attribute, &value, sizeof(value)) == 0;
  };
  blas::LtResult result{};
  int found = 0;
  const float alpha = 1, beta = 0;
  return set(lt.set_matmul, matmul, blas::lt_transa, int32_t{transposition(op.b)}) &&
         set(lt.set_matmul, matmul, blas::lt_transb, int32_t{transposition(op.a)}) &&
         set(lt.set_matmul, matmul, blas::lt_epilogue, blas::lt_add_bias) && set(lt.set_matmul, matmul, blas::lt_bias, op.bias) &&
         set(lt.set_preference, preference, blas::lt_alignment_a, alignment(op.b.data)) &&
         set(lt.set_preference, preference, blas::lt_alignment_b, alignment(op.a.data)) &&
         set(lt.set_preference, preference, blas::lt_alignment_c, alignment(op.c)) &&
         set(lt.set_preference, preference, blas::lt_alignment_d, alignment(op.c)) &&
         lt.find_algorithm(handle, matmul, a, b, c, c, preference, 1, &result, &found) == 0 && found == 1 && result.status == 0 &&
         lt.matmul(handle, matmul, &alpha, op.b.data, a, op.a.data, b, &beta, op.c, c, op.c, c, &result.algorithm, nullptr, 0,
                   stream.handle) == 0;
}

// Splits `op` into two smaller products, which must run in this order. Returns false if `op` stays one product.
bool split(const Gemm& op, Gemm& first, Gemm& second) {
  constexpr int64_t multiple = 8, worthwhile = 1024;
  const auto unaligned = [](int64_t size) { return size > worthwhile && size % multiple != 0; };
  const auto whole = [](int64_t size) { return size / multiple * multiple; };
  if (dtype_bytes(op.a.dtype) != 2 || op.a.stride % multiple != 0 || op.b.stride % multiple != 0 || op.c_stride % multiple != 0)
    return false;
  first = second = op;
  if (unaligned(op.n)) {  // C is contiguous along n
    first.n = whole(op.n);
    second.n = op.n - first.n;
    second.b = tile_at(op.b, 0, first.n);
    second.c = at(op.c, first.n, op.c_dtype);
    second.bias = at(op.bias, first.n, op.c_dtype);
  } else if (op.a.transposed && unaligned(op.m)) {
    first.m = whole(op.m);
    second.m = op.m - first.m;
    second.a = tile_at(op.a, first.m, 0);
    second.c = at(op.c, first.m * op.c_stride, op.c_dtype);
  } else if (!op.a.transposed && unaligned(op.k) && !op.bias) {  // the few terms first, since a 16-bit C rounds the first result
    second.k = whole(op.k);
    second.accumulate = true;
    first.k = op.k - second.k;
    first.a = tile_at(op.a, 0, second.k);
    first.b = tile_at(op.b, second.k, 0);
  } else {
    return false;
  }
  return true;
}

}  // namespace

void gemm(const Gemm& op, Stream stream) {
  if (op.m == 0 || op.n == 0) return;
  if (Gemm first, second; split(op, first, second)) {
    gemm(first, stream);
    return gemm(second, stream);
  }
  static const Library library;
  require(op.a.dtype == op.b.dtype, "gemm: the two matrices must have one dtype");
  require(op.c_dtype == op.a.dtype || op.c_dtype == Dtype::f32, "gemm: the result must have the operands' dtype or be fp32");
  blas::Handle handle = nullptr;
  check(torch_get_current_cuda_blas_handle(&handle), "asking torch for its handle");
  if (op.bias) {
    static const LtLibrary lt{address(library.gemm)};
    require(!op.alpha && !op.accumulate, "gemm: a bias cannot be combined with alpha or accumulate");
    if (!gemm_with_bias(lt, handle, op, stream)) gemm(with_bias_in_c(op, stream), stream);
    return;
  }

  // Makes the library read alpha and beta from host or from device memory.
  const ModeGuard pointers(handle, library.get_pointer_mode, library.set_pointer_mode,
                           [&](int) { return op.alpha ? blas::device : blas::host; });
  const ModeGuard sums(handle, library.get_math_mode, library.set_math_mode,
                       [&](int mode) { return op.a.dtype == Dtype::f32 ? mode : mode | blas::no_reduced_precision; });
  const float host_alpha = 1, host_beta = op.accumulate ? 1 : 0;
  const void* alpha = op.alpha ? op.alpha : &host_alpha;
  const void* beta = op.alpha ? static_cast<const void*>(*device_address(device_beta) + (op.accumulate ? 1 : 0)) : &host_beta;

  const int64_t lda = leading_dimension(op.a, op.m, op.k), ldb = leading_dimension(op.b, op.k, op.n);
  const int64_t ldc = leading_dimension(op.c_stride, op.m, op.n);
  const int type = blas_type(op.a.dtype), c_type = blas_type(op.c_dtype);
  auto run = [&](auto function, auto index) {
    using Index = decltype(index);
    check(function(handle, transposition(op.b), transposition(op.a), Index(op.n), Index(op.m), Index(op.k), alpha, op.b.data, type,
                   Index(ldb), op.a.data, type, Index(lda), beta, op.c, c_type, Index(ldc), blas::compute_f32, blas::default_algorithm),
          "multiplying matrices");
  };
  if (std::max({op.m, op.n, op.k, lda, ldb, ldc}) <= std::numeric_limits<int>::max()) run(library.gemm, int{});
  else if (library.gemm_64) run(library.gemm_64, int64_t{});
  else
    throw std::runtime_error(text("gemm: a size or stride of ", std::max({op.m, op.n, op.k, lda, ldb, ldc}),
                                  " needs 64-bit sizes, which this ", blas::library, " does not have"));
}

}  // namespace liger::gpu
