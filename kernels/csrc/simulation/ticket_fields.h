// The fields of a Python ticket that the event loop knows.
#pragma once

#include "../core/field.h"

namespace kernels::simulation {

struct TicketFields {
  explicit TicketFields(py::handle type)
      : op(type, "op"), lane(type, "lane"), number(type, "number"), urgent(type, "urgent"), state(type, "state"),
        done(type, "done"), started_s(type, "started_s"), finished_s(type, "finished_s"), value(type, "value"),
        packets_run(type, "packets_run"), num_unmet(type, "num_unmet"), waits_for(type, "waits_for"),
        dependents(type, "dependents"), place(type, "place") {}

  Field op, lane, number, urgent, state, done, started_s, finished_s, value, packets_run, num_unmet, waits_for,
      dependents, place;
};

}  // namespace kernels::simulation
