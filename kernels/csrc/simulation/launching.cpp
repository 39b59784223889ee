// Lanes whose ops the host launches before they can begin, as those of a device's streams.
#include <algorithm>

#include "virtual_lanes.h"

namespace kernels::simulation {

namespace {

constexpr int32_t kCopiesInFlight = 2;  // packets of one op that stand in a stream at once

// Its ops are put into streams, where others can wait for them.
bool is_of_device(const std::string& kind) { return kind == "gpu" || kind == "h2d" || kind == "d2h"; }

}  // namespace

double VirtualLanes::launched(Task& task, double own_s, double launching_s) {
  double& until_s = launching_until_s_[task.lane];
  until_s = std::max(until_s, task.launchable_s) + launching_s;
  task.launched_s = until_s;
  return std::max(own_s, until_s - loop_.clock_s());
}

void VirtualLanes::follow_launches(Task& task, PyObject* ticket) {
  if (!loop_.lane(task.lane).launches_ahead) return;
  task.launchable_s = task.submitted_s;
  const ties::Entries followed(fields_.waits_for.get(ticket));
  for (Py_ssize_t i = 0; i < followed.size(); ++i)
    task.launchable_s = std::max(task.launchable_s, task_of(followed[i]).launched_s);
}

void VirtualLanes::make_launchable(PyObject* ticket, double from_s) {
  PyObject* const dependents = fields_.dependents.get(ticket);
  if (dependents == Py_None) return;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dependents); ++i) {
    Task& task = task_of(PyList_GET_ITEM(dependents, i));
    task.launchable_s = std::max(task.launchable_s, from_s);
  }
}

// The op begins: those behind it may be launched once it has been.
void VirtualLanes::launch(Task& task) {
  if (!is_of_device(lane_kinds_[task.lane])) return;
  const double unlaunched = std::max(0, task.packets - kCopiesInFlight) / static_cast<double>(task.packets);
  if (task.launched_s < 0) task.launched_s = loop_.clock_s() + task.late_s + unlaunched * task.alone_s;
  make_launchable(static_cast<PyObject*>(task.ticket), task.launched_s);
}

// The op has ended: those behind one of the host's may be launched once the lane has noticed.
void VirtualLanes::hand_over(const Task& task) {
  if (is_of_device(lane_kinds_[task.lane])) return;
  make_launchable(static_cast<PyObject*>(task.ticket), loop_.clock_s() + loop_.handover_s());
}

}  // namespace kernels::simulation
