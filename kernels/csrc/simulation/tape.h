// Ops that are submitted again and again, in one order: what is asked of Python once for all times, or once each time.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "../core/dependencies.h"
#include "task.h"

namespace kernels::simulation {

namespace py = pybind11;

// What ops have to do that are alike: their first one is asked.
struct TapeCost {
  py::object op;
  bool is_fixed = false;  // the same each time
  bool is_known = false;
  Work work;  // of a piece
  double alone_s = 0;
};

struct TapeOp {
  py::object lane, op;
  py::tuple after;  // places of ops that it follows but for its keys
  TapeCost* cost;  // one of the tape's; null: it is asked itself
  bool urgent, foresees;
  int lane_id;
  int32_t packets, pieces, layer, micro_batch;
  ties::Touches touches;
  mutable int kind = -1;  // its number, given when it first begins
};

struct Tape {
  std::vector<TapeOp> ops;
  std::vector<TapeCost> costs;
  int64_t num_dropped = 0;  // keys that were, when touches were looked up

  template <class Visit>
  int each_object(Visit visit) const {
    for (const TapeCost& cost : costs)
      if (const int stop = visit(cost.op.ptr())) return stop;
    for (const TapeOp& one : ops) {
      for (const PyObject* object : {one.lane.ptr(), one.op.ptr(), one.after.ptr()})
        if (const int stop = visit(const_cast<PyObject*>(object))) return stop;
      for (const auto* touched : {&one.touches.read, &one.touches.written})
        for (const py::object& each : *touched)
          if (const int stop = visit(each.ptr())) return stop;
    }
    return 0;
  }
};

}  // namespace kernels::simulation
