// A tensor without data, for tracing ops (library.h): the ops run on it and compute nothing, and a Recorder counts its
// memory. It has sizes, strides and a dtype. This header declares the same names as ops/torch.h, and ops/tensor.h includes it in place of
// ops/torch.h where the ops are compiled for the trace.
#pragma once
#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/types.h"
#include "trace/recorder.h"

namespace liger::trace {

enum class ScalarType { f32, bf16, f16, f64, Long, Byte };  // the first four have the values of Dtype

class Tensor {
 public:
  Tensor() = default;
  // offset: bytes from a multiple of 16.
  Tensor(Recorder& recorder, std::span<const int64_t> sizes, std::span<const int64_t> strides, ScalarType type, int64_t offset = 0);

  bool defined() const { return memory_ != nullptr; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t i) const { return sizes_[size_t(i)]; }
  int64_t stride(int64_t i) const { return strides_[size_t(i)]; }
  std::span<const int64_t> sizes() const { return {sizes_.data(), size_t(dim_)}; }
  std::span<const int64_t> strides() const { return {strides_.data(), size_t(dim_)}; }
  int64_t numel() const;
  bool is_contiguous() const;
  void* data_ptr() const;
  ScalarType scalar_type() const { return type_; }
  Recorder& recorder() const;

 private:
  friend Tensor narrow_view(Tensor t, int64_t dim, int64_t start, int64_t length);
  struct Memory;
  std::shared_ptr<Memory> memory_;
  int64_t offset_ = 0;  // bytes
  int64_t dim_ = 0;
  std::array<int64_t, 4> sizes_{}, strides_{};
  ScalarType type_ = ScalarType::f32;
};

constexpr bool has_streams = false;
constexpr int64_t type_bytes(ScalarType type) {
  return type == ScalarType::Long ? 8 : type == ScalarType::Byte ? 1 : dtype_bytes(Dtype(type));
}
const char* dtype_name(ScalarType type);
inline ScalarType tensor_type(const Tensor& t) { return t.scalar_type(); }
inline ScalarType scalar_type(Dtype dtype) { return ScalarType(dtype); }
inline std::optional<Dtype> kernel_dtype(ScalarType type) { return type >= ScalarType::Long ? std::optional<Dtype>() : Dtype(type); }
inline bool same_device(const Tensor&, const Tensor&) { return true; }
inline bool takes_float64(const Tensor& t) { return t.recorder().gpu == nullptr; }

class Scope {
 public:
  Scope(const char* op, const Tensor& t) : op_(op), recorder_(t.recorder()) {}
  operator Stream() const { return {0, &recorder_}; }
  const char* op() const { return op_; }
  Recorder& recorder() const { return recorder_; }

  // for_each_range (ops/tensor.h) runs the second of its ranges for all later ones of equal length: `count` of them. It runs the first
  // range, and a shorter one at the end, for one each.
  struct Repeated {
    Recorder& recorder;
    int64_t count, before = recorder.times;
    Repeated(Recorder& recorder, int64_t count) : recorder(recorder), count(count) { recorder.times *= count; }
    ~Repeated() { recorder.times = before; }
  };
  Repeated repeated(int64_t first, int64_t total, int64_t step) const {
    const int64_t full = (total - first) / step;
    return {recorder_, first == 0 || full == 0 ? 1 : full};
  }

 private:
  const char* op_;
  Recorder& recorder_;
};

Tensor allocate_strided(const Scope& scope, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type,
                        const Tensor& like);
inline void copy_into(Tensor, const Tensor&) {}
inline void zero(std::initializer_list<Tensor>) {}

}  // namespace liger::trace
