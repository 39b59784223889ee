// The event loop at the Python border: Python's ops and tickets, the strategy's clock, and the lanes.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../core/dependencies.h"
#include "event_loop.h"
#include "lookups.h"
#include "span_log.h"
#include "tape.h"
#include "ticket_fields.h"

namespace kernels::simulation {

// The border between C++ and Python has to know these of Python's classes.
struct Classes {
  py::object ticket_type, running, done, cancelled;  // states
  py::object imagine, foresee;                       // of an op without a value, and of one that asks for nothing
  py::object machine_error;
  std::vector<std::string> lane_kinds;
};

// seconds = overhead + max(FLOPs / flops_s, device bytes / device_bytes_s, ...)
using Numbers = std::array<double, 5>;
struct Rates {
  double overhead_s, flops_s, device_bytes_s, host_bytes_s, link_bytes_s;
  double seconds(const Work& work) const;
};

class VirtualLanes : private EventLoop::Ops {
 public:
  // `hazards` is Python's, `keys` what it knows by key. Lanes are put into the list `lanes` in the order of their ids.
  VirtualLanes(Classes classes, std::shared_ptr<SpanLog> log, std::shared_ptr<ties::Dependencies> dependencies,
               py::object hazards, py::dict keys, py::list lanes);
  ~VirtualLanes() override;

  // Before the first op: how lanes share, and what ops cost: rates by kind of lane, with others for some kinds of op
  // there, or a function of lane, op and work.
  void share(std::shared_ptr<Sharing> sharing) { loop_.share(std::move(sharing)); }
  using RatesOfOps = std::map<std::pair<std::string, std::string>, Numbers>;  // by kinds of lane and op
  void cost_rates(const std::map<std::string, Numbers>& rates, const RatesOfOps& of_ops) {
    rates_ = rates;
    rates_of_ops_ = of_ops;
  }
  void cost_function(py::object seconds) { seconds_ = std::move(seconds); }
  // Sets what the strategy's thread pays for a submission and a wake-up, and a lane for a hand-over.
  void host_times(double submit_s, double wake_s, double handover_s, double handover_beside_s);
  // Sets by kind of lane what it takes from one op to the next; before any lane is added.
  void turns(const std::map<std::string, double>& turns_s) { turns_s_ = turns_s; }

  // Lets lanes of this kind launch ahead; before any lane is added. The cost function may give two numbers for their ops:
  // an op's own seconds on the device, and those that the host takes to launch it, one after another. The host launches
  // an op once those that it follows have been launched, or have ended if they are on a lane of the host.
  void launch_ahead(const std::string& kind) { ahead_kind_ = kind; }

  // Lets the op foresee what its work depends on, ties it to earlier ones, and returns its ticket, queued.
  py::object submit(py::handle lane, py::handle op, py::handle after, bool urgent);
  void withdraw(py::handle ticket);

  // Keeps ops that will be submitted together, in this order, and returns their number: (lane, op, the places of those
  // that it follows but for its keys, whether it is urgent, the place in `costs` or -1). `costs` are (op, is_fixed): what
  // all that have the place do. A fixed one is asked once, another one each time, where rates say what it takes.
  size_t add_tape(const py::list& ops, const py::list& costs);
  // Submits them and returns their tickets.
  py::list submit_tape(size_t number);
  // Until any of them, or all there are, have settled; the strategy is woken. False: nothing runs and no op is ready.
  bool wait_any(const py::list& tickets);
  bool drain();
  // The lanes do what they have done by the strategy's time.
  void catch_up();
  // Returns for how long the strategy's thread works on at the lanes' moment; 0 while it waits or wakes up.
  double strategy_left_s() const {
    const double now_s = loop_.clock_s();
    return woken_s_ <= now_s && now_s < host_s_ ? host_s_ - now_s : 0;
  }
  void spend(double seconds);

  double host_s() const { return host_s_; }
  int64_t num_submitted() const { return num_submitted_; }
  bool is_busy(const std::string& kind) const;
  py::dict totals() const;        // (lane id, kind) -> (ops that have ended, seconds, and work)
  py::list pending() const;       // by lane in their order: (id, pending tickets, tickets on the lane)
  py::list kinds() const { return kinds_; }

  py::object world = py::none();

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  void begin(Task& task) override;
  void begin_piece(Task& task) override;
  void end(Task& task) override;

  int id_of(py::handle lane);
  void foresee(py::handle op);
  Task task_of_op(int lane, PyObject* op, bool urgent);
  void enqueue(Task task, const py::object& ticket);
  int add_lane(py::handle lane);
  // Asks the op for its work, and fills in the cost of the piece that begins.
  void set_cost(Task& task, PyObject* op);
  // Fills in the cost of a tape's op by what those alike cost; false where it is to be asked itself.
  bool take_cost(Task& task);
  int64_t num_dropped_keys() const;
  const Rates& rates_of(const Task& task);
  Task& task_of(PyObject* ticket);
  bool is_ticket(PyObject* object) const;
  bool is_settled(PyObject* ticket) const;
  double seconds_of(Task& task, PyObject* op, const py::object& work);
  // Returns the seconds of an op whose launching takes the host so long.
  double launched(Task& task, double own_s, double launching_s);
  // Where lanes launch ahead: notes what a new op follows, or when those behind an op may be launched.
  void follow_launches(Task& task, PyObject* ticket);
  void make_launchable(PyObject* ticket, double from_s);
  void launch(Task& task);
  void hand_over(const Task& task);
  double seconds_of_launches(const Task& task, PyObject* op);
  uint16_t kind_code(PyObject* op);
  bool step(double until_s = kNever);
  void wake();
  [[noreturn]] void fail(const Task& task, py::error_already_set& error);

  const Classes classes_;
  const TicketFields fields_;
  std::shared_ptr<SpanLog> log_;
  EventLoop loop_;
  std::map<std::string, Numbers> rates_;
  RatesOfOps rates_of_ops_;
  std::vector<std::string> lane_kinds_;                    // by lane
  std::vector<std::vector<std::optional<Rates>>> known_;  // by lane, by kind of op
  py::object seconds_;  // null where rates are given
  double submit_s_ = 0, wake_s_ = 0, host_s_ = 0;
  double woken_s_ = 0;  // when the strategy's thread began what it has done last
  std::map<std::string, double> turns_s_;
  std::string ahead_kind_;                // of lanes that launch ahead; empty: none do
  std::vector<double> launching_until_s_;  // by lane: when the host has launched its op that began last
  int64_t next_number_ = 0;  // each is given once, though what is submitted may be refused
  int64_t num_submitted_ = 0, num_settled_ = 0;
  std::deque<Tape> tapes_;  // which stay where they are
  std::deque<Task> tasks_;  // a ticket's `place` is that of its task, until it settles
  std::vector<size_t> free_;
  py::list kinds_;
  py::dict kind_codes_;
  OwnMethods imagine_, foresee_;  // most ops bring nothing to the host and foresee nothing, and are not asked
  const std::shared_ptr<ties::Dependencies> dependencies_;
  py::object hazards_;
  py::dict keys_;
  py::list lanes_;
  LaneIds ids_;
  std::string failure_;
};

}  // namespace kernels::simulation
