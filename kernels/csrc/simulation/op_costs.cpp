// What an op costs: by rates, by a function of Python, or as those of a tape that are alike.
#include <algorithm>

#include "python_values.h"
#include "virtual_lanes.h"

namespace kernels::simulation {

double Rates::seconds(const Work& work) const {
  return overhead_s + std::max(std::max(work.flops / flops_s, work.device_bytes / device_bytes_s),
                               std::max(work.host_bytes / host_bytes_s, work.link_bytes / link_bytes_s));
}

void VirtualLanes::set_cost(Task& task, PyObject* op) {
  static PyObject* const name = interned("work");
  const py::object work = ties::owned(PyObject_CallMethodNoArgs(op, name));
  task.work = to_work(work);
  py::object of_piece = work;
  if (task.pieces > 1) {
    const Work all = task.work;
    const double n = task.pieces;
    task.work = {all.flops / n, all.device_bytes / n, all.host_bytes / n, all.link_bytes / n};
    const Work& own = task.work;
    if (seconds_) of_piece = py::type::of(work)(own.flops, own.device_bytes, own.host_bytes, own.link_bytes);
  }
  task.late_s = 0;
  task.alone_s = seconds_of(task, op, of_piece);
  for (const double seconds : {task.alone_s, task.late_s}) {
    if (seconds >= 0 && seconds < kNever) continue;
    throw py::value_error("costs " + std::string(py::str(py::float_(seconds))) + " s, which no clock can show");
  }
}

const Rates& VirtualLanes::rates_of(const Task& task) {
  auto& known = known_[task.lane];
  if (known.size() <= task.kind) known.resize(task.kind + 1u);
  auto& rates = known[task.kind];
  if (!rates) {
    const std::string& lane = lane_kinds_[task.lane];
    const auto own = rates_of_ops_.find({lane, py::str(kinds_[task.kind])});
    const Numbers& r = own == rates_of_ops_.end() ? rates_.at(lane) : own->second;
    rates = Rates{r[0], r[1], r[2], r[3], r[4]};
  }
  return *rates;
}

double VirtualLanes::seconds_of(Task& task, PyObject* op, const py::object& work) {
  static PyObject* const launches = interned("launches");
  if (!seconds_) {
    const int64_t number = whole(attribute(op, launches).ptr());
    if (number == 1) return rates_of(task).seconds(task.work);
    if (number < 1 || task.pieces > 1) throw py::value_error("an op has pieces, or launches >= 1");
    return seconds_of_launches(task, op);
  }
  auto* const ticket = static_cast<PyObject*>(task.ticket);
  PyObject* const arguments[] = {fields_.lane.get(ticket), op, work.ptr()};
  PyObject* const seconds = PyObject_Vectorcall(seconds_.ptr(), arguments, 3, nullptr);
  if (!seconds) throw py::error_already_set();
  const auto found = py::reinterpret_steal<py::object>(seconds);
  if (!PyTuple_CheckExact(found.ptr())) return real(found.ptr());
  if (PyTuple_GET_SIZE(found.ptr()) != 2) throw py::value_error("an op costs one number or two");
  const double own_s = real(PyTuple_GET_ITEM(found.ptr(), 0)), other_s = real(PyTuple_GET_ITEM(found.ptr(), 1));
  if (loop_.lane(task.lane).launches_ahead) return launched(task, own_s, other_s);
  task.late_s = other_s;
  return own_s;
}

// They run one after another.
double VirtualLanes::seconds_of_launches(const Task& task, PyObject* op) {
  static PyObject* const name = interned("launch_works");
  PyObject* const made = PyObject_CallMethodNoArgs(op, name);
  if (!made) throw py::error_already_set();
  double seconds = 0;
  for (py::handle work : py::reinterpret_steal<py::object>(made))
    seconds += rates_of(task).seconds(to_work(borrowed(work.ptr())));
  return seconds;
}

bool VirtualLanes::take_cost(Task& task) {
  static PyObject* const launches = interned("launches");
  if (!task.of_tape || !task.of_tape->cost || seconds_) return false;
  const TapeOp& one = *task.of_tape;
  TapeCost& cost = *one.cost;
  if (!cost.is_known && whole(attribute(cost.op.ptr(), launches).ptr()) != 1) return false;
  if (one.kind < 0) one.kind = kind_code(one.op.ptr());
  task.kind = static_cast<uint16_t>(one.kind);
  task.layer = one.layer;
  task.micro_batch = one.micro_batch;
  if (!cost.is_known) {
    set_cost(task, cost.op.ptr());
    cost.work = task.work;
    cost.alone_s = task.alone_s;
    cost.is_known = true;
  }
  task.work = cost.work;
  task.alone_s = cost.alone_s;
  return true;
}

}  // namespace kernels::simulation
