// liger_ext._C: what was built, device profiles and launch plans, for Python. Knows nothing of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <vector>

#include "launch/plan.h"

namespace py = pybind11;
using namespace liger::launch;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information, device profiles and launch plans of liger_ext";
  m.attr("version") = LIGER_EXT_VERSION;
  m.attr("torch_version") = LIGER_TORCH_VERSION;
  m.attr("gpu_backend") = LIGER_GPU_BACKEND;
  m.attr("gpu_architectures") = LIGER_GPU_ARCHS;

  py::enum_<Path>(m, "Path").value("regs", Path::regs).value("reread", Path::reread).value("stream", Path::stream);
  py::class_<DeviceProfile>(m, "DeviceProfile")
      .def(py::init<>())
      .def_readwrite("arch", &DeviceProfile::arch)
      .def_readwrite("warp", &DeviceProfile::warp)
      .def_readwrite("multiprocessors", &DeviceProfile::multiprocessors)
      .def_readwrite("max_block_threads", &DeviceProfile::max_block_threads)
      .def_property(
          "resident_clusters", [](const DeviceProfile& d) { return std::vector<int>(std::begin(d.resident_clusters[0]), std::end(d.resident_clusters[0])); },
          // As many times as many where a multiprocessor holds several blocks: there is at least that much room.
          [](DeviceProfile& d, const std::array<int, 4>& counts) {
            for (int blocks = 1; blocks <= 3; ++blocks)
              for (int i = 0; i < 4; ++i) d.resident_clusters[blocks - 1][i] = blocks * counts[i];
          });
  py::class_<RowTiling>(m, "RowTiling")
      .def(py::init<>())
      .def_readwrite("vec", &RowTiling::vec)
      .def_readwrite("max_k", &RowTiling::max_k)
      .def_readwrite("max_block", &RowTiling::max_block)
      .def_readwrite("min_block", &RowTiling::min_block)
      .def_readwrite("prefer_k", &RowTiling::prefer_k);
  py::class_<LaunchPlan>(m, "LaunchPlan")
      .def_readonly("path", &LaunchPlan::path)
      .def_readonly("vec", &LaunchPlan::vec)
      .def_readonly("k", &LaunchPlan::k)
      .def_readonly("threads_per_row", &LaunchPlan::threads_per_row)
      .def_readonly("block", &LaunchPlan::block)
      .def_readonly("grid", &LaunchPlan::grid)
      .def_readonly("cluster", &LaunchPlan::cluster)
      .def_readonly("smem", &LaunchPlan::smem)
      .def_readonly("warp", &LaunchPlan::warp)
      .def_readonly("partial_rows", &LaunchPlan::partial_rows);
  m.def("plan_row", &plan_row, py::arg("device"), py::arg("rows"), py::arg("cols"), py::arg("tiling"));
  m.def("plan_row_forward", &plan_row_forward, py::arg("device"), py::arg("rows"), py::arg("cols"), py::arg("vec"), py::arg("max_k"),
        py::arg("streams") = false);
  m.def("plan_norm_backward", &plan_norm_backward, py::arg("device"), py::arg("rows"), py::arg("cols"), py::arg("vec"), py::arg("max_block"));
}
