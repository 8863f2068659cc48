// Translates C++ exceptions into Python's for boxed.h, without Python's headers.
#include "ops/boxed.h"

#include <dlfcn.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/errors.h"

struct _object;   // PyObject

// In torch from 2.13 on; null with an older torch.
extern "C" [[gnu::weak]] const char* torch_exception_get_what_without_backtrace();

// Declared as in torch/csrc/Exceptions.h, which needs Python's headers. Each version of torch translates other exceptions of std (2.15
// turns std::invalid_argument into RuntimeError), but every version calls this class's python_type().
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

// Two functions of Python's C API that are in every version's stable ABI; null in a process that runs no Python.
struct Python {
  _object* (*import)(const char* module) = nullptr;
  _object* (*attribute)(_object* object, const char* name) = nullptr;

  Python() {
    import = reinterpret_cast<decltype(import)>(dlsym(RTLD_DEFAULT, "PyImport_ImportModule"));
    attribute = reinterpret_cast<decltype(attribute)>(dlsym(RTLD_DEFAULT, "PyObject_GetAttrString"));
  }
  static const Python& instance() {
    static const Python python;
    return python;
  }
};

class PythonError final : public torch::PyTorchError {
 public:
  PythonError(const char* module, const char* type, const std::exception& error)
      : PyTorchError(error.what()), module_(module), type_(type) {}

  // torch calls it with Python's lock held, and takes a borrowed reference. So the references to module and type are never released.
  _object* python_type() override {
    const Python& python = Python::instance();
    _object* module = python.import(module_);
    return module ? python.attribute(module, type_) : nullptr;
  }

 private:
  const char *module_, *type_;
};

}  // namespace

std::string torch_error_text() {
  const auto words = torch_exception_get_what_without_backtrace;
  return words ? words() : "";
}

void rethrow_for_python() {
  if (!Python::instance().import || !Python::instance().attribute) throw;
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
  }   // every version of torch turns the others into RuntimeError
}

}  // namespace liger
