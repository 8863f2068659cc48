// Python bindings of csrc/trace, which runs the fused loss on tensors without data: the memory, time and operations of each plan, and a
// plan's matmuls and kernel launches.
#include "trace/fused_loss.h"

#include "python/ops.h"
#include "trace/cost.h"

namespace liger::python {
namespace {

using launch::DeviceProfile;
using launch::Rates;
using trace::LossCall;
using trace::LossPlan;
using trace::Recorder;
using PlanFields = std::tuple<int64_t, int64_t, int64_t>;

LossPlan loss_plan(const PlanFields& fields) { return {launch::Gradients(std::get<0>(fields)), std::get<1>(fields), std::get<2>(fields)}; }

std::vector<std::tuple<int64_t, double, int64_t, int64_t>> costs(const LossCall& call, const std::vector<PlanFields>& plans,
                                                                 const DeviceProfile* gpu, const Rates& rates) {
  std::vector<std::tuple<int64_t, double, int64_t, int64_t>> all;
  for (const PlanFields& plan : plans) {
    Recorder recorder(gpu, rates, false);
    const int64_t forward = trace_fused_loss(call, loss_plan(plan), recorder).multiplications;
    all.emplace_back(recorder.peak, recorder.seconds, forward, recorder.multiplications - forward);
  }
  return all;
}

using MatmulFields = std::tuple<int64_t, int64_t, int64_t, bool, int64_t>;
std::pair<std::vector<MatmulFields>, std::vector<std::pair<std::string, int64_t>>> lists(const LossCall& call, const PlanFields& plan,
                                                                                         const DeviceProfile* gpu, const Rates& rates) {
  Recorder recorder(gpu, rates, true);
  trace_fused_loss(call, loss_plan(plan), recorder);
  std::vector<MatmulFields> matmuls;
  for (const auto& one : recorder.matmuls) matmuls.emplace_back(one.m, one.n, one.k, one.accumulates, one.times);
  std::vector<std::pair<std::string, int64_t>> kernels;
  for (const auto& one : recorder.kernels) kernels.emplace_back(one.launch.kernel->name, one.times);
  return {matmuls, kernels};
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
  py::class_<LossCall>(m, "LossCall", "The properties of a fused loss call that its plan depends on (csrc/trace/fused_loss.h).")
      .def(py::init([](int64_t rows, int64_t hidden, int64_t vocab, const ScalarType& compute, const ScalarType& x,
                       const ScalarType& weight, const std::optional<ScalarType>& bias, const std::optional<ScalarType>& class_weight,
                       const std::optional<ScalarType>& sum, bool dx, bool dweight, bool dbias, bool per_row, bool label_smoothing,
                       bool softcap, bool token_scaling, bool z_loss, bool token_accuracy, bool predicted_tokens, bool moments,
                       bool temperature, bool wide_logits, bool in_place) {
        // For a dtype that no kernel supports, the op raises an error with any plan.
        const auto known = [](const ScalarType& type) { return kernel_dtype(type).value_or(Dtype::f32); };
        const auto optional_dtype = [](const std::optional<ScalarType>& type) {
          return type ? kernel_dtype(*type) : std::optional<Dtype>();
        };
        return LossCall{rows,
                        hidden,
                        vocab,
                        known(compute),
                        known(x),
                        known(weight),
                        optional_dtype(bias),
                        optional_dtype(class_weight),
                        optional_dtype(sum),
                        dx,
                        dweight,
                        dbias,
                        per_row,
                        label_smoothing,
                        softcap,
                        token_scaling,
                        z_loss,
                        token_accuracy,
                        predicted_tokens,
                        moments,
                        temperature,
                        wide_logits,
                        in_place};
      }));
  m.def("loss_costs", &costs, py::arg("call"), py::arg("plans"), py::arg("gpu").none(true), py::arg("rates"),
        "For each plan (gradients, rows, classes): peak bytes beside the arguments, estimated seconds, and the multiplications of the "
        "matmuls of the forward and of the backward.");
  m.def("loss_trace", &lists, py::arg("call"), py::arg("plan"), py::arg("gpu").none(true), py::arg("rates"),
        "The work of a plan, in order: matmuls (m, n, k, whether it accumulates, count), and kernels with their counts.");
});

}  // namespace liger::python
