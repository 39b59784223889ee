// Ops that are submitted again in one call: nothing is asked of Python that cannot have changed.
#include <tuple>

#include "python_values.h"
#include "virtual_lanes.h"

namespace kernels::simulation {

size_t VirtualLanes::add_tape(const py::list& ops, const py::list& costs) {
  static PyObject *const layer = interned("layer"), *const micro_batch = interned("micro_batch");
  Tape tape;
  for (py::handle entry : costs) {
    TapeCost cost;
    std::tie(cost.op, cost.is_fixed) = py::cast<std::tuple<py::object, bool>>(entry);
    tape.costs.push_back(std::move(cost));
  }
  for (py::handle entry : ops) {
    auto [lane, op, after, urgent, cost] = py::cast<std::tuple<py::object, py::object, py::tuple, bool, int>>(entry);
    const Task task = task_of_op(id_of(lane), op.ptr(), urgent);
    for (py::handle place : after)
      if (py::cast<size_t>(place) >= tape.ops.size()) throw py::value_error("an op follows earlier ones");
    if (cost >= static_cast<int>(tape.costs.size())) throw py::value_error("no such cost: " + std::to_string(cost));
    TapeCost* const its_cost = cost < 0 ? nullptr : &tape.costs[static_cast<size_t>(cost)];
    const bool foresees = foresee_.has(op.ptr());
    const int32_t its_layer = number_or_none(op.ptr(), layer), batch = number_or_none(op.ptr(), micro_batch);
    tape.ops.push_back({std::move(lane), std::move(op), std::move(after), its_cost, urgent, foresees, task.lane,
                        task.packets, task.pieces, its_layer, batch, {}});
  }
  tapes_.push_back(std::move(tape));
  return tapes_.size() - 1;
}

int64_t VirtualLanes::num_dropped_keys() const { return whole(hazards_.attr("num_dropped").ptr()); }

py::list VirtualLanes::submit_tape(size_t number) {
  Tape& tape = tapes_.at(number);
  if (const int64_t now = num_dropped_keys(); now != tape.num_dropped) {
    for (TapeOp& one : tape.ops) one.touches = {};
    tape.num_dropped = now;
  }
  for (TapeCost& cost : tape.costs) cost.is_known = cost.is_known && cost.is_fixed;
  py::list tickets;
  for (TapeOp& one : tape.ops) {
    py::tuple after(one.after.size());
    for (size_t i = 0; i < after.size(); ++i) after[i] = tickets[py::cast<size_t>(one.after[i])];
    if (one.foresees) foresee(one.op);
    py::object ticket = dependencies_->ticket_of(one.op, one.lane, next_number_++, one.urgent);
    dependencies_->tie_again(hazards_, keys_, ticket, after, one.touches);
    Task task;
    task.of_tape = &one;
    task.lane = one.lane_id;
    task.packets = one.packets;
    task.pieces = one.pieces;
    task.urgent = one.urgent;
    enqueue(task, ticket);
    tickets.append(std::move(ticket));
  }
  return tickets;
}

}  // namespace kernels::simulation
