#include "virtual_lanes.h"

#include <algorithm>

#include "python_values.h"

namespace kernels::simulation {

VirtualLanes::VirtualLanes(Classes classes, std::shared_ptr<SpanLog> log,
                           std::shared_ptr<ties::Dependencies> dependencies, py::object hazards, py::dict keys,
                           py::list lanes)
    : classes_(std::move(classes)), fields_(classes_.ticket_type), log_(std::move(log)), loop_(*this, *log_),
      imagine_("imagine", classes_.imagine), foresee_("foresee", classes_.foresee),
      dependencies_(std::move(dependencies)), hazards_(std::move(hazards)), keys_(std::move(keys)),
      lanes_(std::move(lanes)) {
  if (classes_.lane_kinds.size() > kMaxKinds) throw py::value_error("more kinds of lanes than expected");
}

VirtualLanes::~VirtualLanes() { clear(); }

void VirtualLanes::host_times(double submit_s, double wake_s, double handover_s, double handover_beside_s) {
  submit_s_ = submit_s;
  wake_s_ = wake_s;
  loop_.set_handover_s(handover_s, handover_beside_s);
}

int VirtualLanes::add_lane(py::handle lane) {
  const auto kind = py::cast<std::string>(lane.attr("kind"));
  const auto& kinds = classes_.lane_kinds;
  const auto found = std::find(kinds.begin(), kinds.end(), kind);
  if (found == kinds.end()) throw py::value_error("no kind of lane: " + kind);
  if (!seconds_ && !rates_.count(kind)) throw py::value_error("no costs are known for lanes of kind " + kind);
  const int rank = py::cast<int>(lane.attr("rank"));
  lanes_.append(lane);
  lane_kinds_.push_back(kind);
  known_.emplace_back();
  launching_until_s_.push_back(0);
  const int id = loop_.add_lane(kind, static_cast<int>(found - kinds.begin()), rank);
  if (const auto turn = turns_s_.find(kind); turn != turns_s_.end()) loop_.set_turn_s(id, turn->second);
  if (kind == ahead_kind_) loop_.set_launches_ahead(id);
  return id;
}

// -- the strategy's side ---------------------------------------------------------------------------------------------

int VirtualLanes::id_of(py::handle lane) {
  return ids_.of(lane.ptr(), [this](py::handle added) { return add_lane(added); });
}

py::object VirtualLanes::submit(py::handle lane, py::handle op, py::handle after, bool urgent) {
  const int id = id_of(lane);
  if (foresee_.has(op.ptr())) foresee(op);
  py::object ticket = dependencies_->ticket_of(op, lane, next_number_++, urgent);
  dependencies_->tie(hazards_, keys_, ticket, after);
  enqueue(task_of_op(id, op.ptr(), urgent), ticket);
  return ticket;
}

void VirtualLanes::foresee(py::handle op) {
  static PyObject* const name = interned("foresee");
  if (world.is_none()) return;
  PyObject* const done = PyObject_CallMethodOneArg(op.ptr(), name, world.ptr());
  if (!done) throw py::error_already_set();
  Py_DECREF(done);
}

Task VirtualLanes::task_of_op(int lane, PyObject* op, bool urgent) {
  static PyObject *const packets = interned("packets"), *const pieces = interned("pieces");
  Task task;
  task.lane = lane;
  task.urgent = urgent;
  const auto all_packets = static_cast<int32_t>(whole(attribute(op, packets).ptr()));
  task.pieces = static_cast<int32_t>(whole(attribute(op, pieces).ptr()));
  if (all_packets < 1) throw py::value_error("an op needs packets >= 1, got " + std::to_string(all_packets));
  if (task.pieces < 1 || all_packets % task.pieces)
    throw py::value_error("an op's pieces have equally many packets: " + std::to_string(all_packets) + " in " +
                          std::to_string(task.pieces));
  task.packets = all_packets / task.pieces;
  return task;
}

void VirtualLanes::enqueue(Task task, const py::object& ticket) {
  PyObject* const object = ticket.ptr();
  task.ticket = object;
  task.number = whole(fields_.number.get(object));
  task.ready = whole(fields_.num_unmet.get(object)) == 0;
  task.submitted_s = host_s_ + submit_s_;
  for (int32_t piece = 0; piece < task.pieces; ++piece) host_s_ += submit_s_;
  if (free_.empty()) {
    free_.push_back(tasks_.size());
    tasks_.emplace_back();
  }
  const size_t place = free_.back();
  free_.pop_back();
  if (!ahead_kind_.empty()) follow_launches(task, object);
  tasks_[place] = task;
  Py_INCREF(object);
  fields_.place.set(object, py::int_(place));
  ++num_submitted_;
  loop_.submit(tasks_[place]);
}

void VirtualLanes::withdraw(py::handle ticket) {
  Task& task = task_of(ticket.ptr());
  loop_.withdraw(task);
  ++num_settled_;
  free_.push_back(static_cast<size_t>(whole(fields_.place.get(ticket.ptr()))));
  fields_.place.set(ticket.ptr(), py::none());
  task.ticket = nullptr;
  Py_DECREF(ticket.ptr());
}

bool VirtualLanes::wait_any(const py::list& tickets) {
  for (py::handle ticket : tickets)
    if (!is_ticket(ticket.ptr())) throw py::type_error("wait: needs tickets");
  const auto any_settled = [&] {
    return std::any_of(tickets.begin(), tickets.end(), [&](py::handle t) { return is_settled(t.ptr()); });
  };
  while (!any_settled()) {
    const int64_t before = num_settled_;
    while (num_settled_ == before)
      if (!step()) return false;
  }
  wake();
  return true;
}

bool VirtualLanes::drain() {
  while (num_settled_ < num_submitted_)
    if (!step()) return false;
  wake();
  return true;
}

// Wakes the strategy, since what it awaited has happened. If it did not have to wait, it needs no waking.
void VirtualLanes::wake() {
  if (loop_.clock_s() > host_s_) {
    host_s_ = woken_s_ = loop_.clock_s() + wake_s_;
  } else {
    catch_up();
  }
}

void VirtualLanes::catch_up() {
  while (loop_.clock_s() < host_s_) step(host_s_);
}

void VirtualLanes::spend(double seconds) { host_s_ = std::max(host_s_, loop_.clock_s()) + seconds; }

bool VirtualLanes::step(double until_s) {
  if (!failure_.empty()) {
    py::set_error(classes_.machine_error, failure_.c_str());
    throw py::error_already_set();
  }
  return loop_.step(until_s);
}

bool VirtualLanes::is_ticket(PyObject* object) const {
  return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(classes_.ticket_type.ptr());
}

bool VirtualLanes::is_settled(PyObject* ticket) const {
  PyObject* const state = fields_.state.get(ticket);
  return state == classes_.done.ptr() || state == classes_.cancelled.ptr();
}

// At an instant at which an op has ended, the next one has not begun yet: a head that may run counts.
bool VirtualLanes::is_busy(const std::string& kind) const {
  const auto may_run = [&](const std::deque<Task*>& queue) {
    return !queue.empty() && queue.front()->ready && queue.front()->submitted_s <= loop_.clock_s();
  };
  const auto& lanes = loop_.lanes();
  return std::any_of(lanes.begin(), lanes.end(), [&](const VirtualLane* lane) {
    return lane->kind == kind && (lane->running || lane->paused || may_run(lane->urgent) || may_run(lane->normal));
  });
}

py::dict VirtualLanes::totals() const {
  auto sums = log_->totals();
  for (const VirtualLane* lane : loop_.lanes()) {
    if (!lane->running) continue;
    const Task& task = *lane->running;
    if (sums.size() <= static_cast<size_t>(lane->id)) sums.resize(lane->id + 1);
    if (sums[lane->id].size() <= task.kind) sums[lane->id].resize(task.kind + 1u);
    const double run_s = std::max(0.0, loop_.clock_s() - lane->span_start_s);
    sums[lane->id][task.kind].add(false, run_s, task.work, loop_.part_of_running(*lane));
  }
  py::dict found;
  for (size_t lane = 0; lane < sums.size(); ++lane)
    for (size_t kind = 0; kind < sums[lane].size(); ++kind) {
      const Totals& t = sums[lane][kind];
      if (t.num_ops == 0 && t.busy_s == 0) continue;
      const Work& w = t.work;
      found[py::make_tuple(lane, kinds_[kind])] =
          py::make_tuple(t.num_ops, t.busy_s, w.flops, w.device_bytes, w.host_bytes, w.link_bytes);
    }
  return found;
}

py::list VirtualLanes::pending() const {
  py::list found;
  for (const VirtualLane* lane : loop_.lanes()) {
    py::list waiting, occupants;
    const auto add_occupant = [&](const Task& task) {
      auto* const ticket = static_cast<PyObject*>(task.ticket);
      fields_.packets_run.set(ticket, py::int_(task.pieces_done * task.packets + task.packets_done));
      occupants.append(borrowed(ticket));
    };
    for (const auto* queue : {&lane->urgent, &lane->normal})
      for (const Task* task : *queue)
        if (task->pieces_done) {  // an urgent one, between two pieces
          add_occupant(*task);
        } else {
          waiting.append(borrowed(static_cast<PyObject*>(task->ticket)));
        }
    for (const Task* task : {lane->running, lane->paused})
      if (task) add_occupant(*task);
    found.append(py::make_tuple(lane->id, waiting, occupants));
  }
  return found;
}

// -- the lanes' side -------------------------------------------------------------------------------------------------

void VirtualLanes::begin(Task& task) {
  static PyObject *const layer = interned("layer"), *const micro_batch = interned("micro_batch");
  auto* const ticket = static_cast<PyObject*>(task.ticket);
  try {
    if (!take_cost(task)) {
      PyObject* const op = fields_.op.get(ticket);
      task.kind = kind_code(op);
      set_cost(task, op);
      if (log_->keeps_rows()) {
        task.layer = number_or_none(op, layer);
        task.micro_batch = number_or_none(op, micro_batch);
      }
    }
  } catch (py::error_already_set& error) {
    fail(task, error);
  } catch (py::builtin_exception& error) {
    error.set_error();
    py::error_already_set raised;
    fail(task, raised);
  }
  if (!ahead_kind_.empty()) launch(task);
  if (task.pieces_done) return;
  fields_.state.set(ticket, classes_.running);
  fields_.started_s.set(ticket, py::float_(loop_.clock_s() + task.late_s));
}

// Only a function may give each piece another time.
void VirtualLanes::begin_piece(Task& task) {
  if (seconds_) begin(task);
}

uint16_t VirtualLanes::kind_code(PyObject* op) {
  static PyObject* const name = interned("kind");
  const py::object kind = attribute(op, name);
  PyObject* const known = PyDict_GetItemWithError(kind_codes_.ptr(), kind.ptr());
  if (known) return static_cast<uint16_t>(whole(known));
  if (PyErr_Occurred()) throw py::error_already_set();
  const size_t code = kinds_.size();
  kinds_.append(kind);
  kind_codes_[kind] = code;
  return static_cast<uint16_t>(code);
}

void VirtualLanes::end(Task& task) {
  static PyObject* const name = interned("imagine");
  const py::object ticket = borrowed(static_cast<PyObject*>(task.ticket));
  PyObject* const object = ticket.ptr();
  PyObject* const op = fields_.op.get(object);
  if (imagine_.has(op)) {
    PyObject* const value = PyObject_CallMethodOneArg(op, name, world.ptr());
    if (!value) {
      py::error_already_set error;
      fail(task, error);
    }
    fields_.value.set(object, py::reinterpret_steal<py::object>(value));
  }
  fields_.state.set(object, classes_.done);
  fields_.finished_s.set(object, py::float_(loop_.clock_s()));
  fields_.done.set(object, py::bool_(true));
  if (!ahead_kind_.empty()) hand_over(task);
  free_.push_back(static_cast<size_t>(whole(fields_.place.get(object))));
  fields_.place.set(object, py::none());
  task.ticket = nullptr;
  Py_DECREF(object);
  ++num_settled_;
  const py::object dependents = borrowed(fields_.dependents.get(object));
  if (dependents.is_none()) return;
  fields_.dependents.set(object, py::none());
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dependents.ptr()); ++i) {
    PyObject* const dependent = PyList_GET_ITEM(dependents.ptr(), i);
    const int64_t num_unmet = whole(fields_.num_unmet.get(dependent)) - 1;
    fields_.num_unmet.set(dependent, py::int_(num_unmet));
    if (num_unmet) continue;
    fields_.waits_for.set(dependent, py::tuple());
    loop_.make_ready(task_of(dependent));
  }
}

Task& VirtualLanes::task_of(PyObject* ticket) {
  PyObject* const place = fields_.place.get(ticket);
  if (PyLong_Check(place)) {
    const auto index = static_cast<size_t>(whole(place));
    if (index < tasks_.size() && tasks_[index].ticket == ticket) return tasks_[index];
  }
  throw std::logic_error(std::string(py::str(ticket)) + " is not pending here");
}

// The machine is of no use after this; every later call is told the same.
void VirtualLanes::fail(const Task& task, py::error_already_set& error) {
  const std::string type = py::str(error.type().attr("__name__")), text = py::str(error.value());
  failure_ = std::string(py::str(static_cast<PyObject*>(task.ticket))) + " failed: " + type + ": " + text;
  if (error.matches(classes_.machine_error)) failure_ = text;
  if (error.matches(classes_.machine_error) || !error.matches(PyExc_Exception)) throw error;
  py::raise_from(error, classes_.machine_error.ptr(), failure_.c_str());
  throw py::error_already_set();
}

// -- garbage collection: ops may know the machine --------------------------------------------------------------------

int VirtualLanes::traverse(visitproc visit, void* arg) const {
  Py_VISIT(world.ptr());
  Py_VISIT(seconds_.ptr());
  Py_VISIT(hazards_.ptr());
  Py_VISIT(keys_.ptr());
  for (const Task& task : tasks_) Py_VISIT(static_cast<PyObject*>(task.ticket));
  for (const Tape& tape : tapes_)
    if (const int stop = tape.each_object([&](PyObject* object) {
          Py_VISIT(object);
          return 0;
        }))
      return stop;
  return 0;
}

void VirtualLanes::clear() {
  seconds_ = py::object();
  world = py::none();
  hazards_ = py::none();
  keys_ = py::dict();
  failure_ = "the machine is gone";
  for (Task& task : tasks_) {
    auto* const ticket = static_cast<PyObject*>(task.ticket);
    task.ticket = nullptr;
    Py_XDECREF(ticket);
  }
  std::deque<Tape>().swap(tapes_);
  imagine_.clear();
  foresee_.clear();
  ids_.clear();
}

}  // namespace kernels::simulation
