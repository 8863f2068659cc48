// The Python module liger_ext._C: device profiles, launch plans and traces (of the library liger_ext_plans), and the ops' checks. Needs no
// torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "launch/chunks.h"
#include "launch/norms.h"
#include "launch/profiles.h"
#include "python/ops.h"

namespace py = pybind11;
using namespace liger::launch;

namespace liger::python {
namespace {

std::vector<void (*)(py::module_&, py::module_&)>& all_bindings() {  // filled as the module is loaded, by the files of the ops
  static std::vector<void (*)(py::module_&, py::module_&)> all;
  return all;
}

}  // namespace

OpBindings::OpBindings(void (*bind)(py::module_&, py::module_&)) { all_bindings().push_back(bind); }

}  // namespace liger::python

namespace {

// Stores `blocks` times the counts if a multiprocessor holds `blocks` blocks: at least that many clusters fit.
void set_clusters(DeviceProfile& device, const std::array<int, 4>& counts) {
  for (int blocks = 1; blocks <= 3; ++blocks)
    for (int i = 0; i < 4; ++i) device.resident_clusters[blocks - 1][i] = blocks * counts[i];
}

void bind_profiles(py::module_& m) {
  py::enum_<Vendor>(m, "Vendor").value("nvidia", Vendor::nvidia).value("amd", Vendor::amd).value("host", Vendor::host);
  py::class_<DeviceProfile>(m, "DeviceProfile", "The properties of a GPU that launch plans depend on.")
      .def(py::init<>())
      .def_property_readonly("name", [](const DeviceProfile& d) { return std::string(d.name); })
      .def_property_readonly("architecture", &architecture_text)
      .def_property_readonly("address", [](const DeviceProfile& d) { return reinterpret_cast<uintptr_t>(&d); })
      .def_property_readonly_static("size", [](const py::object&) { return sizeof(DeviceProfile); })
      .def_readwrite("vendor", &DeviceProfile::vendor)
      .def_readwrite("arch", &DeviceProfile::arch)
      .def_readwrite("warp", &DeviceProfile::warp)
      .def_readwrite("multiprocessors", &DeviceProfile::multiprocessors)
      .def_readwrite("max_block_threads", &DeviceProfile::max_block_threads)
      .def_readwrite("registers_per_multiprocessor", &DeviceProfile::registers_per_multiprocessor)
      .def_readwrite("shared_per_block", &DeviceProfile::shared_per_block)
      .def_readwrite("shared_per_block_optin", &DeviceProfile::shared_per_block_optin)
      .def_readwrite("shared_per_multiprocessor", &DeviceProfile::shared_per_multiprocessor)
      .def_readwrite("l2_bytes", &DeviceProfile::l2_bytes)
      .def_readwrite("memory_bytes", &DeviceProfile::memory_bytes)
      .def_readwrite("native_bf16", &DeviceProfile::native_bf16)
      .def_readwrite("bulk_copies", &DeviceProfile::bulk_copies)
      .def_readwrite("async_copies", &DeviceProfile::async_copies)
      .def_property(
          "resident_clusters",
          [](const DeviceProfile& d) { return std::vector<int>(std::begin(d.resident_clusters[0]), std::end(d.resident_clusters[0])); },
          [](DeviceProfile& d, const std::array<int, 4>& counts) { set_clusters(d, counts); });
  m.def("profiles", &reference_profiles, "The reference profiles: GPUs that plans are shown and tested for.");
  m.def("profile", &reference_profile, py::arg("name"), "The reference profile of this name; ValueError lists the names.");
}

// The table for liger_ext_gpu_set_knobs: the bytes of one KnobEntry after another.
py::bytes packed(const std::vector<std::tuple<std::string, std::string, int, int64_t, int64_t, std::array<int, 3>, Knobs>>& entries) {
  std::vector<KnobEntry> table;
  for (const auto& [device, kernel, vec, rows, cols, heads, knobs] : entries) {
    KnobEntry& entry = table.emplace_back(KnobEntry{{tunable_id(kernel), vec, rows, cols, heads[0], heads[1], heads[2]}, knobs});
    device.copy(entry.device, sizeof(entry.device) - 1);
  }
  return {reinterpret_cast<const char*>(table.data()), table.size() * sizeof(KnobEntry)};
}

void bind_knobs(py::module_& m) {
  py::class_<Knobs>(m, "Knobs", "The launch parameters that tuning may change (csrc/launch/knobs.h); 0: the planner's choice.")
      .def(py::init([](int threads, int block, int cluster, int stages, int resident) {
             return Knobs{threads, block, cluster, stages, resident};
           }),
           py::kw_only(), py::arg("threads") = 0, py::arg("block") = 0, py::arg("cluster") = 0, py::arg("stages") = 0,
           py::arg("resident") = 0)
      .def("__eq__", [](const Knobs& a, const Knobs& b) { return a == b; })
      .def_readonly("threads", &Knobs::threads)
      .def_readonly("block", &Knobs::block)
      .def_readonly("cluster", &Knobs::cluster)
      .def_readonly("stages", &Knobs::stages)
      .def_readonly("resident", &Knobs::resident);
  m.attr("knob_entry_bytes") = sizeof(KnobEntry);
  m.def("pack_knobs", &packed, py::arg("entries"),
        "Packs entries for the GPU library: (device name or \"\", the tunable of a launch or \"every\", elements of an access, rows, cols, "
        "(q_heads, "
        "k_heads, rotary_dim), "
        "Knobs).");
  m.def(
      "find_knobs",
      [](const py::bytes& table, const DeviceProfile& device, const std::string& kernel, int vec, int64_t rows, int64_t cols,
         std::array<int, 3> heads) {
        const std::string_view bytes = table;
        set_knobs(reinterpret_cast<const KnobEntry*>(bytes.data()), bytes.size() / sizeof(KnobEntry));
        const Knobs found = tuned_knobs(device, {tunable_id(kernel), vec, rows, cols, heads[0], heads[1], heads[2]});
        set_knobs(nullptr, 0);
        return found;
      },
      py::arg("table"), py::arg("device"), py::arg("kernel"), py::arg("vec"), py::arg("rows"), py::arg("cols"),
      py::arg("heads") = std::array<int, 3>{}, "The knobs that the GPU library would find in this table for a call.");
}

// The integer template arguments of an instance.
std::vector<int> arguments(const Instance& kernel_instance) {
  std::vector<int> all;
  for (const int one : {kernel_instance.vec, kernel_instance.k, kernel_instance.row_layout})
    if (one != none) all.push_back(one);
  return all;
}

void bind_launches(py::module_& m) {
  m.def(
      "instances",
      [] {
        std::map<std::string, std::vector<std::tuple<std::vector<int>, int, bool>>> all;
        for (const Kernel* kernel : kernels())
          for (const Instance& kernel_instance : kernel->instances)
            if (kernel_instance.max_threads > 0)
              all[kernel->name].emplace_back(arguments(kernel_instance), kernel_instance.max_threads, kernel_instance.ahead);
        return all;
      },
      "All instances of every kernel: integer template arguments, launch bound, and whether HIP's library lacks it.");
  py::class_<Launch>(
      m, "NamedLaunch",
      "A launch of an op: the kernel, its integer template arguments, its plan and launch bound, and the tunable it belongs to.")
      .def_property_readonly("kernel", [](const Launch& named_launch) { return named_launch.kernel->name; })
      .def_property_readonly("instance", [](const Launch& named_launch) { return arguments(named_launch.instance); })
      .def_property_readonly("max_threads", [](const Launch& named_launch) { return named_launch.instance.max_threads; })
      .def_readonly("rows", &Launch::rows)
      .def_readonly("cols", &Launch::cols)
      .def_readonly("plan", &Launch::plan)
      .def_property_readonly("tunable", [](const Launch& named_launch) { return named_launch.tunable.name; });
}

void bind_plans(py::module_& m) {
  py::enum_<Path>(m, "Path").value("regs", Path::regs).value("two_pass", Path::two_pass);
  py::class_<RowTiling>(m, "RowTiling")
      .def(py::init<>())
      .def_readwrite("vec", &RowTiling::vec)
      .def_readwrite("max_k", &RowTiling::max_k)
      .def_readwrite("max_block", &RowTiling::max_block)
      .def_readwrite("bound", &RowTiling::bound)
      .def_readwrite("min_block", &RowTiling::min_block)
      .def_readwrite("k", &RowTiling::k)
      .def_readwrite("long_k", &RowTiling::long_k)
      .def_readwrite("long_from", &RowTiling::long_from);
  py::class_<LaunchPlan>(m, "LaunchPlan")
      .def_readonly("path", &LaunchPlan::path)
      .def_readonly("vec", &LaunchPlan::vec)
      .def_readonly("k", &LaunchPlan::k)
      .def_readonly("threads_per_row", &LaunchPlan::threads_per_row)
      .def_readonly("block", &LaunchPlan::block)
      .def_readonly("grid", &LaunchPlan::grid)
      .def_readonly("cluster", &LaunchPlan::cluster)
      .def_readonly("smem", &LaunchPlan::smem)
      .def_readonly("stages", &LaunchPlan::stages)
      .def_readonly("slots", &LaunchPlan::slots)
      .def_readonly("shared_offset", &LaunchPlan::shared_offset)
      .def_readonly("warp", &LaunchPlan::warp)
      .def_readonly("lanes", &LaunchPlan::lanes)
      .def_readonly("q_slots", &LaunchPlan::q_slots)
      .def_readonly("k_slots", &LaunchPlan::k_slots)
      .def_readonly("partial_rows", &LaunchPlan::partial_rows);
  m.def("plan_row", &plan_row, py::arg("device"), py::arg("rows"), py::arg("cols"), py::arg("tiling"), py::arg("knobs") = Knobs{});
  m.def("plan_row_forward", &plan_row_forward, py::arg("device"), py::arg("rows"), py::arg("cols"), py::arg("tiling"),
        py::arg("knobs") = Knobs{}, py::arg("cluster_from") = std::numeric_limits<int64_t>::max());
  m.def("plan_norm_backward", &plan_norm_backward, py::arg("device"), py::arg("rows"), py::arg("cols"), py::arg("vec"), py::arg("centered"),
        py::arg("knobs") = Knobs{});
  m.def("norm_partial_rows", &norm_partial_rows, py::arg("device"), py::arg("rows"), py::arg("cols"), py::arg("centered"));
  m.def("padded_vocab", &padded_vocab, py::arg("vocab"));
  py::enum_<Gradients>(m, "Gradients", "The fused loss's strategies for the gradients (csrc/ops/fused_linear.h).")
      .value("none", Gradients::none)
      .value("deferred", Gradients::deferred)
      .value("accumulated", Gradients::accumulated)
      .value("recomputed", Gradients::recomputed)
      .value("overlaid", Gradients::overlaid);
  m.def("gradient_strategy", &gradient_strategy, py::arg("input"), py::arg("parameters"), py::arg("at_once"), py::arg("per_row"));
  py::class_<OverlaidChunk>(m, "OverlaidChunk", "See csrc/launch/chunks.h.")
      .def_readonly("first", &OverlaidChunk::first)
      .def_readonly("classes", &OverlaidChunk::classes)
      .def_readonly("offset", &OverlaidChunk::offset)
      .def_property_readonly("place", [](const OverlaidChunk& p) { return std::array{"dweight", "rest", "spare"}[size_t(p.place)]; })
      .def_readonly("again", &OverlaidChunk::again);
  m.def(
      "overlaid_layout",
      [](int64_t rows, int64_t room, int64_t hidden, int64_t vocab, int64_t stored) {
        const OverlaidLayout layout = best_overlaid_layout(rows, room, hidden, vocab, stored);
        return std::pair(layout.chunks, layout.spare);
      },
      py::arg("rows"), py::arg("room"), py::arg("hidden"), py::arg("vocab"), py::arg("stored"), "The chunks, and the size of the spare.");
  m.def("equal_chunks", &equal_chunks, py::arg("rows"), py::arg("most"));

  bind_launches(m);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Device profiles, launch plans and argument checks of liger_ext";
  bind_profiles(m);
  bind_knobs(m);
  bind_plans(m);
  py::module_ checks = m.def_submodule("checks", "For each op, a function of its arguments that raises the op's errors.");
  for (const auto bind : liger::python::all_bindings()) bind(m, checks);
}
