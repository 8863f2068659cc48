// The tensor type with which csrc/checks is compiled for Python: it refers to a Python tensor, which may have no data (fake or meta), and
// has the functions that the checks call. It reads sizes, strides, dtype and device from Python's attributes, since this module does not
// depend on torch.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "kernels/types.h"

namespace liger::python {

namespace py = pybind11;

// An int or a SymInt. While a graph is traced, a comparison may add a guard to it, or raise an error of torch, which passes through.
class Size {
 public:
  Size() = default;
  Size(int64_t value) : value_(py::int_(value)) {}
  explicit Size(py::object value) : value_(std::move(value)) {}

  friend bool operator==(const Size& a, const Size& b) { return a.value_.equal(b.value_); }
  friend bool operator<(const Size& a, const Size& b) { return a.value_ < b.value_; }
  friend bool operator<=(const Size& a, const Size& b) { return a.value_ <= b.value_; }
  friend bool operator>=(const Size& a, const Size& b) { return a.value_ >= b.value_; }
  friend bool operator>(const Size& a, const Size& b) { return a.value_ > b.value_; }
  friend Size operator*(const Size& a, const Size& b) { return Size(a.value_ * b.value_); }
  friend Size operator+(const Size& a, const Size& b) { return Size(a.value_ + b.value_); }
  friend Size operator-(const Size& a, const Size& b) { return Size(a.value_ - b.value_); }
  friend Size operator/(const Size& a, const Size& b) { return checked_result(PyNumber_FloorDivide(a.value_.ptr(), b.value_.ptr())); }
  friend Size operator%(const Size& a, const Size& b) { return checked_result(PyNumber_Remainder(a.value_.ptr(), b.value_.ptr())); }
  const py::object& object() const { return value_; }
  friend void append(std::string& text, const Size& size) { text += std::string(py::str(size.value_)); }

 private:
  static Size checked_result(PyObject* value) {
    if (value == nullptr) throw py::error_already_set();
    return Size(py::reinterpret_steal<py::object>(value));
  }
  py::object value_;
};

// A torch.dtype, by its name.
struct ScalarType {
  ScalarType() = default;
  explicit ScalarType(const py::object& dtype) : name(py::str(dtype)) {}
  explicit ScalarType(const char* name) : name(name) {}
  friend bool operator==(const ScalarType&, const ScalarType&) = default;
  static const ScalarType Long, Byte;
  std::string name;
};
inline const ScalarType ScalarType::Long{"torch.int64"}, ScalarType::Byte{"torch.uint8"};

constexpr const char* kernel_type_names[] = {"torch.float32", "torch.bfloat16", "torch.float16", "torch.float64"};  // as in Dtype
inline const std::string& dtype_name(const ScalarType& type) { return type.name; }
inline ScalarType scalar_type(Dtype dtype) { return ScalarType(kernel_type_names[static_cast<int>(dtype)]); }
inline std::optional<Dtype> kernel_dtype(const ScalarType& type) {
  for (int i = 0; i < int(std::size(kernel_type_names)); ++i)
    if (type.name == kernel_type_names[i]) return Dtype(i);
  return {};
}

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(py::object tensor) : tensor_(std::move(tensor)) {}

  bool defined() const { return !tensor_.is_none(); }
  int64_t dim() const { return tensor_.attr("dim")().cast<int64_t>(); }
  Size size(int64_t i) const { return Size(tensor_.attr("shape")[py::int_(i)]); }
  Size stride(int64_t i) const { return Size(tensor_.attr("stride")(i)); }
  std::vector<Size> sizes() const {
    std::vector<Size> all;
    for (const py::handle size : tensor_.attr("shape")) all.emplace_back(py::reinterpret_borrow<py::object>(size));
    return all;
  }
  Size numel() const { return Size(tensor_.attr("numel")()); }
  bool is_contiguous() const { return tensor_.attr("is_contiguous")().cast<bool>(); }
  ScalarType type() const { return ScalarType(tensor_.attr("dtype")); }
  py::object device() const { return tensor_.attr("device"); }

 private:
  py::object tensor_;
};
using OptionalTensor = std::optional<Tensor>;

inline ScalarType tensor_type(const Tensor& t) { return t.type(); }
inline bool same_device(const Tensor& t, const Tensor& like) { return t.device().equal(like.device()); }
inline bool takes_float64(const Tensor& t) { return std::string(py::str(t.device().attr("type"))) != "cuda"; }

}  // namespace liger::python

// The conversion of arguments of functions that Python calls. It accepts any object, since the op's schema has checked the type.
namespace pybind11::detail {
template <class T> struct any_object_caster {
  PYBIND11_TYPE_CASTER(T, const_name("Any"));
  bool load(handle source, bool) {
    value = T(reinterpret_borrow<object>(source));
    return true;
  }
};
template <> struct type_caster<liger::python::Size> : any_object_caster<liger::python::Size> {
  static handle cast(const liger::python::Size& size, return_value_policy, handle) { return object(size.object()).release(); }
};
template <> struct type_caster<liger::python::ScalarType> : any_object_caster<liger::python::ScalarType> {};
template <> struct type_caster<liger::python::Tensor> : any_object_caster<liger::python::Tensor> {};
}  // namespace pybind11::detail
