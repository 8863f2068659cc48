// Python bindings of csrc/trace, which runs the fused loss on tensors without data: the memory, time and operations of each plan, and a
// plan's matmuls and kernel launches.
#include "trace/fused_loss.h"

#include "kernels/errors.h"
#include "python/ops.h"
#include "trace/cost.h"

namespace liger::python {
namespace {

using launch::DeviceProfile;
using launch::Rates;
using trace::Argument;
using trace::LossPlan;
using trace::Recorder;

// Throws std::invalid_argument for a dtype that no argument of the op may have.
trace::ScalarType traced_type(const py::handle& dtype) {
  const ScalarType type(py::reinterpret_borrow<py::object>(dtype));
  if (type == ScalarType::Long) return trace::ScalarType::Long;
  if (type == ScalarType::Byte) return trace::ScalarType::Byte;
  const std::optional<Dtype> known = kernel_dtype(type);
  require(known.has_value(), "the op has no kernels for ", type.name);
  return trace::scalar_type(*known);
}

trace::Layout traced_layout(const py::tuple& value) {
  if (py::len(value) == 4) {
    const auto [shape, dtype, strides, offset] = value.cast<std::tuple<std::vector<int64_t>, py::object, std::vector<int64_t>, int64_t>>();
    require(strides.size() == shape.size(), "a tensor has ", shape.size(), " sizes and ", strides.size(), " strides");
    return {shape, strides, traced_type(dtype), offset};
  }
  const auto [shape, dtype, readable] = value.cast<std::tuple<std::vector<int64_t>, py::object, bool>>();
  trace::Layout layout{shape, std::vector<int64_t>(shape.size()), traced_type(dtype)};  // strides of 0, which the op does not read
  int64_t stride = 1;
  for (size_t i = readable ? shape.size() : 0; i-- > 0; stride *= shape[i]) layout.strides[i] = stride;
  return layout;
}

Argument traced_argument(const py::handle& value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::tuple>(value)) return traced_layout(py::reinterpret_borrow<py::tuple>(value));
  return traced_type(value);
}

// The arguments of the op, each None, a bool, an int, a float, a dtype, or a tensor's (shape, dtype, readable), or (shape, dtype, strides,
// bytes from an address that is a multiple of 16).
std::vector<Argument> traced_arguments(const py::tuple& values) {
  std::vector<Argument> all;
  for (const py::handle value : values) try {
      all.push_back(traced_argument(value));
    } catch (const py::cast_error&) {
      throw std::invalid_argument("argument " + std::to_string(all.size()) + " is " + std::string(py::repr(value)) +
                                  ", expected None, a bool, an int, a float, a dtype or (shape, dtype, strides, offset)");
    }
  return all;
}

using Costs = std::tuple<int64_t, double, int64_t, int64_t>;
std::vector<Costs> costs(const py::tuple& arguments, const std::vector<LossPlan>& plans, bool in_place, const DeviceProfile* gpu,
                         const Rates& rates) {
  std::vector<Costs> all;
  try {  // the op raises these errors with any plan
    const std::vector<Argument> traced = traced_arguments(arguments);
    for (const LossPlan& plan : plans) {
      Recorder recorder(gpu, rates, false);
      const int64_t forward = trace_fused_loss(traced, plan, in_place, recorder).multiplications;
      all.emplace_back(recorder.peak, recorder.seconds, forward, recorder.multiplications - forward);
    }
  } catch (const std::invalid_argument&) {
    all.assign(plans.size(), Costs());
  }
  return all;
}

using MatmulFields = std::tuple<int64_t, int64_t, int64_t, bool, int64_t>;
std::pair<std::vector<MatmulFields>, std::vector<std::pair<std::string, int64_t>>> lists(const py::tuple& arguments, const LossPlan& plan,
                                                                                         const DeviceProfile* gpu, const Rates& rates) {
  Recorder recorder(gpu, rates, true);
  trace_fused_loss(traced_arguments(arguments), plan, true, recorder);
  std::vector<MatmulFields> matmuls;
  for (const auto& one : recorder.matmuls) matmuls.emplace_back(one.m, one.n, one.k, one.accumulates, one.times);
  std::vector<std::pair<std::string, int64_t>> kernels;
  for (const auto& one : recorder.kernels) kernels.emplace_back(one.launch.kernel->name, one.times);
  return {matmuls, kernels};
}

// The launches of an op's call, in order, without matmuls.
std::vector<launch::Launch> launches(const std::string& op, const DeviceProfile& device, const py::tuple& arguments,
                                     const launch::Knobs& knobs) {
  const auto found = trace::traced_ops().find(op);
  if (found == trace::traced_ops().end()) {
    std::string known;
    for (const auto& [name, traced] : trace::traced_ops()) known += (known.empty() ? "" : ", ") + std::string(name);
    throw std::invalid_argument("no op is called '" + op + "'; known: " + known);
  }
  const Rates rates = launch::device_rates(&device);
  Recorder recorder(&device, rates, true);
  recorder.knobs = &knobs;
  found->second(traced_arguments(arguments), recorder);
  std::vector<launch::Launch> all;
  for (const auto& one : recorder.kernels) all.push_back(one.launch);
  return all;
}

}  // namespace

const OpBindings trace_bindings([](py::module_& m, py::module_&) {
  py::class_<Rates>(m, "Rates", "The speed of a device (csrc/launch/rates.h): operations, bytes and seconds.")
      .def(py::init<>())
      .def_readwrite("matmul_16", &Rates::matmul_16)
      .def_readwrite("matmul_32", &Rates::matmul_32)
      .def_readwrite("bandwidth", &Rates::bandwidth)
      .def_readwrite("launch", &Rates::launch)
      .def_readwrite("fresh", &Rates::fresh)
      .def_readwrite("measured", &Rates::measured);
  m.def("device_rates", &launch::device_rates, py::arg("gpu").none(true),
        "The rates of the nearest reference GPU, scaled by the number of multiprocessors; None: a CPU.");
  m.def("nearest_reference", &launch::nearest_reference, py::arg("gpu"), "The reference GPU whose data sheet gives a GPU's rates.");
  m.def("matmul_seconds", &trace::matmul_seconds, py::arg("rates"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("operand_bytes"),
        py::arg("result_bytes"), py::arg("accumulates"), "The estimated time of a matmul (csrc/trace/cost.h).");
  m.def("loss_costs", &costs, py::arg("arguments"), py::arg("plans"), py::arg("in_place"), py::arg("gpu").none(true), py::arg("rates"),
        "For each plan (gradients, rows, classes): peak bytes beside the arguments, estimated seconds, and the multiplications of the "
        "matmuls of the forward and of the backward; zeros for a call that the op refuses.");
  m.def("plans", &launches, py::arg("op"), py::arg("device"), py::arg("arguments"), py::kw_only(), py::arg("knobs") = launch::Knobs{},
        "The launches of a call of an op on a device, in order; no GPU is needed. arguments: of its schema, with a tensor's "
        "(shape, dtype, strides, bytes behind a multiple of 16) in place of each tensor.");
  m.def("loss_trace", &lists, py::arg("arguments"), py::arg("plan"), py::arg("gpu").none(true), py::arg("rates"),
        "The work of a plan, in order: matmuls (m, n, k, whether it accumulates, count), and kernels with their counts.");
});

}  // namespace liger::python
