// The simulator at the Python border: harness/machine/simulated.py says what its functions mean.
#include "bindings.h"

#include <pybind11/stl.h>

#include "lane_order.h"
#include "sharing.h"
#include "span_log.h"
#include "virtual_lanes.h"

namespace py = pybind11;
using namespace kernels::simulation;

namespace {

py::bytes rows(const SpanLog& log, size_t first, size_t last) {
  last = std::min(last, log.num_rows());
  if (first >= last) return py::bytes();
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>((last - first) * sizeof(SpanRow)));
  if (!made) throw py::error_already_set();
  log.copy(first, last, PyBytes_AS_STRING(made));
  return py::reinterpret_steal<py::bytes>(made);
}

// Returns the speeds of lanes (kind, rank from 0 on without gaps) with these demands.
std::vector<double> speeds(Sharing& sharing, const std::vector<std::pair<int, int>>& lanes,
                           const std::vector<double>& demands) {
  std::vector<LaneName> names;
  std::vector<double> wanted, result;
  for (size_t i = 0; i < lanes.size(); ++i) {
    names.push_back({lanes[i].first, lanes[i].second});
    wanted.push_back(sharing.wanted(demands.at(i)));
  }
  sharing.speeds(names, wanted, result);
  return result;
}

py::tuple lane_order(std::vector<int32_t> lane, std::vector<bool> urgent, std::vector<int64_t> packets,
                     std::vector<double> packet_s, std::vector<std::vector<int32_t>> before) {
  const OpGraph graph{std::move(lane), std::move(urgent), std::move(packets), std::move(packet_s), std::move(before)};
  const size_t size = graph.lane.size();
  if (graph.urgent.size() != size || graph.packets.size() != size || graph.packet_s.size() != size ||
      graph.before.size() != size)
    throw py::value_error("a graph has one entry for each node");
  for (size_t node = 0; node < size; ++node) {
    if (graph.lane[node] < -1 || graph.lane[node] >= static_cast<int64_t>(size))
      throw py::value_error("lanes are numbered from 0 on, and there are no more than nodes");
    if (graph.packets[node] < 1 || !(graph.packet_s[node] >= 0))
      throw py::value_error("a node has one packet or more, which take no less than 0 s");
    for (const int32_t earlier : graph.before[node])
      if (earlier < 0 || static_cast<size_t>(earlier) >= node)
        throw py::value_error("what precedes a node has a smaller number");
  }
  const LaneOrder found = in_lane_order(graph);
  py::list befores;
  for (const auto& runs : found.before) {
    py::tuple one(runs.size());
    for (size_t i = 0; i < runs.size(); ++i) one[i] = runs[i];
    befores.append(std::move(one));
  }
  return py::make_tuple(found.nodes, found.seconds, befores, found.last);
}

std::unique_ptr<VirtualLanes> make_lanes(py::object ticket_type, py::object running, py::object done,
                                         py::object cancelled, py::object imagine, py::object foresee,
                                         py::object machine_error, std::vector<std::string> lane_kinds,
                                         std::shared_ptr<SpanLog> log,
                                         std::shared_ptr<kernels::ties::Dependencies> dependencies,
                                         py::object hazards, py::dict keys, py::list lanes) {
  return std::make_unique<VirtualLanes>(
      Classes{std::move(ticket_type), std::move(running), std::move(done), std::move(cancelled), std::move(imagine),
              std::move(foresee), std::move(machine_error), std::move(lane_kinds)},
      std::move(log), std::move(dependencies), std::move(hazards), std::move(keys), std::move(lanes));
}

void collect_garbage_in(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<VirtualLanes&>(py::handle(self)).traverse(visit, arg);
  };
  type->tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<VirtualLanes&>(py::handle(self)).clear();
    return 0;
  };
}

}  // namespace

namespace kernels {

void bind_simulation(py::module_& m) {
  m.def("in_lane_order", &lane_order, py::kw_only(), py::arg("lane"), py::arg("urgent"), py::arg("packets"),
        py::arg("packet_s"), py::arg("before"));
  py::class_<Sharing, std::shared_ptr<Sharing>>(m, "Sharing").def("speeds", &speeds);
  py::class_<SharedMemory, Sharing, std::shared_ptr<SharedMemory>>(m, "SharedMemory").def(py::init<double, bool>());
  py::class_<MeasuredTogether, Sharing, std::shared_ptr<MeasuredTogether>>(m, "MeasuredTogether")
      .def(py::init<MeasuredTogether::Table>());
  py::class_<SpanLog, std::shared_ptr<SpanLog>>(m, "SpanLog")
      .def(py::init<bool>(), py::arg("keeps_rows"))
      .def("__len__", &SpanLog::num_rows)
      .def("rows", &rows)
      .def("clear", &SpanLog::clear);
  py::class_<VirtualLanes>(m, "VirtualLanes", py::custom_type_setup(collect_garbage_in))
      .def(py::init(&make_lanes), py::kw_only(), py::arg("ticket_type"), py::arg("running"), py::arg("done"),
           py::arg("cancelled"), py::arg("imagine"), py::arg("foresee"), py::arg("machine_error"),
           py::arg("lane_kinds"), py::arg("log"), py::arg("dependencies"), py::arg("hazards"), py::arg("keys"),
           py::arg("lanes"))
      .def("share", &VirtualLanes::share)
      .def("cost_rates", &VirtualLanes::cost_rates, py::arg("rates"), py::arg("of_ops") = VirtualLanes::RatesOfOps())
      .def("cost_function", &VirtualLanes::cost_function)
      .def("launch_ahead", &VirtualLanes::launch_ahead)
      .def("host_times", &VirtualLanes::host_times)
      .def("turns", &VirtualLanes::turns)
      .def("strategy_left_s", &VirtualLanes::strategy_left_s)
      .def("submit", &VirtualLanes::submit)
      .def("add_tape", &VirtualLanes::add_tape)
      .def("submit_tape", &VirtualLanes::submit_tape)
      .def("withdraw", &VirtualLanes::withdraw)
      .def("wait_any", &VirtualLanes::wait_any)
      .def("drain", &VirtualLanes::drain)
      .def("catch_up", &VirtualLanes::catch_up)
      .def("spend", &VirtualLanes::spend)
      .def("is_busy", &VirtualLanes::is_busy)
      .def("totals", &VirtualLanes::totals)
      .def("pending", &VirtualLanes::pending)
      .def("kinds", &VirtualLanes::kinds)
      .def_property_readonly("host_s", &VirtualLanes::host_s)
      .def_property_readonly("num_submitted", &VirtualLanes::num_submitted)
      .def_readwrite("world", &VirtualLanes::world);
}

}  // namespace kernels
