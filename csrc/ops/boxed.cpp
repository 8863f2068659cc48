#include "ops/boxed.h"

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/errors.h"

// Python's C API, of which two functions are used that are in every version's stable ABI. Weak: the process has them if it runs Python,
// and the libraries also load where it does not.
extern "C" {
struct _object;   // PyObject
[[gnu::weak]] _object* PyImport_ImportModule(const char* name);
[[gnu::weak]] _object* PyObject_GetAttrString(_object* object, const char* name);
}

// Of torch 2.13 and newer; null where the torch that runs is older.
extern "C" [[gnu::weak]] const char* torch_exception_get_what_without_backtrace();

// As in torch/csrc/Exceptions.h, which needs Python's headers. Which of std's exceptions the bindings of torch know depends on its
// version (2.15 takes std::invalid_argument for a RuntimeError), but each of them asks this class for the type in Python.
namespace torch {
struct PyTorchError : std::exception {
  PyTorchError(std::string text) : msg(std::move(text)) {}
  virtual _object* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};
}  // namespace torch

namespace liger {
namespace {

class PythonError final : public torch::PyTorchError {
 public:
  PythonError(const char* module, const char* type, const std::exception& error)
      : PyTorchError(error.what()), module_(module), type_(type) {}

  // Called by torch, which holds Python's lock and wants a borrowed reference: module and type are kept for good.
  _object* python_type() override {
    _object* module = PyImport_ImportModule(module_);
    return module ? PyObject_GetAttrString(module, type_) : nullptr;
  }

 private:
  const char *module_, *type_;
};

}  // namespace

std::string torch_said() {
  const auto words = torch_exception_get_what_without_backtrace;
  return words ? words() : "";
}

void rethrow_for_python() {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    throw PythonError("torch", "OutOfMemoryError", error);
  } catch (const std::bad_alloc& error) {
    throw PythonError("builtins", "MemoryError", error);
  } catch (const std::out_of_range& error) {
    throw PythonError("builtins", "IndexError", error);
  } catch (const std::logic_error& error) {   // std::invalid_argument, std::length_error
    throw PythonError("builtins", "ValueError", error);
  }   // every torch takes the others for RuntimeError
}

}  // namespace liger
