// The mover at the Python border. Arguments are addresses and numbers that kernels/mover.py has validated.
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "../link/clock.h"
#include "mover.h"
#include "regions.h"

namespace py = pybind11;
using namespace kernels;

namespace {

constexpr double kSignalCheckS = 0.1;  // a waiting main thread reacts to Ctrl-C within this time

std::vector<Region> to_regions(const std::vector<uintptr_t>& dsts, const std::vector<uintptr_t>& srcs,
                               const std::vector<int64_t>& sizes_bytes) {
  std::vector<Region> regions(dsts.size());
  for (size_t i = 0; i < dsts.size(); ++i)
    regions[i] = {reinterpret_cast<char*>(dsts[i]), reinterpret_cast<const char*>(srcs[i]), sizes_bytes.at(i)};
  return regions;
}

class Ticket {
 public:
  explicit Ticket(std::shared_ptr<Mover> mover) : mover_(std::move(mover)) {}

  // Once, before the ticket is given to anybody.
  void submit(std::vector<Region> regions, Priority priority, uintptr_t wait_event, uintptr_t record_event) {
    request_ = mover_->traffic().submit(std::move(regions), priority, wait_event, record_event);
  }

  bool cancel() { return mover_->traffic().cancel(request_); }

  // Negative timeout: none. False: it passed.
  bool wait(double timeout_s, bool issued) {
    Traffic& traffic = mover_->traffic();
    const double deadline_s = timeout_s < 0 ? std::numeric_limits<double>::infinity() : now_s() + timeout_s;
    struct Waiting {
      std::atomic<int>& count;
      ~Waiting() { --count; }
    } waiting{mover_->num_waiting};
    ++mover_->num_waiting;
    while (true) {
      bool over;
      {
        py::gil_scoped_release unlocked;
        over = traffic.wait(*request_, issued, std::min(deadline_s, now_s() + kSignalCheckS));
      }
      if (over) return true;
      if (now_s() >= deadline_s) return false;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  template <class Value>
  Value read(Value Request::* field) const {
    return mover_->traffic().locked([&] { return (*request_).*field; });
  }

  bool settled() const {
    return mover_->traffic().locked([&] { return request_->settled(); });
  }

  py::list spans() const {
    std::vector<PacketSpan> spans = read(&Request::spans);
    std::sort(spans.begin(), spans.end(), [](const PacketSpan& a, const PacketSpan& b) { return a.number < b.number; });
    py::list list;
    for (const PacketSpan& span : spans)
      list.append(py::make_tuple(span.number, span.num_bytes, span.start_s, span.finish_s));
    return list;
  }

 private:
  std::shared_ptr<Mover> mover_;
  RequestPtr request_;
};

py::list counters(Mover& mover) {
  Traffic& traffic = mover.traffic();
  const double now = now_s();
  py::list list;
  for (const ClassCounters& c : traffic.counters())
    list.append(py::make_tuple(c.num_requests, c.num_done, c.num_failed, c.num_cancelled, c.num_packets, c.num_bytes,
                               c.busy_s(now)));
  return list;
}

const char* state_name(RequestState state) {
  switch (state) {
    case RequestState::kWaiting:
      return "waiting";
    case RequestState::kStarted:
      return "started";
    case RequestState::kDone:
      return "done";
    case RequestState::kFailed:
      return "failed";
    default:
      return "cancelled";
  }
}

void bind_ticket(py::module_& m) {
  py::class_<Ticket>(m, "MoverTicket")
      .def("cancel", &Ticket::cancel)
      .def("wait", &Ticket::wait)
      .def("spans", &Ticket::spans)
      .def("settled", &Ticket::settled)
      .def("state", [](const Ticket& t) { return state_name(t.read(&Request::state)); })
      .def("error", [](const Ticket& t) { return t.read(&Request::error); })
      .def("submitted_s", [](const Ticket& t) { return t.read(&Request::submitted_s); })
      .def("finished_s", [](const Ticket& t) { return t.read(&Request::finished_s); })
      .def("num_finished_before", [](const Ticket& t) { return t.read(&Request::num_finished_before); });
}

}  // namespace

void bind_mover(py::module_& m) {
  bind_ticket(m);
  py::class_<Mover, std::shared_ptr<Mover>>(m, "Mover")
      .def(py::init([](int64_t packet_bytes, int depth, double rate_bytes_s, double catch_up_s, int num_threads,
                       int num_slots, int num_staging_threads, std::vector<int> cores, int device,
                       std::string runtime_path) {
        const MoverConfig config{packet_bytes, depth,     rate_bytes_s,        catch_up_s,
                                 num_threads,  num_slots, num_staging_threads, std::move(cores),
                                 device,       std::move(runtime_path)};
        py::gil_scoped_release unlocked;
        return std::make_shared<Mover>(config);
      }))
      .def("submit",
           [](std::shared_ptr<Mover> mover, py::object entry, const std::vector<uintptr_t>& dsts,
              const std::vector<uintptr_t>& srcs, const std::vector<int64_t>& sizes_bytes, bool urgent,
              uintptr_t wait_event, uintptr_t record_event) {
             // `entry.ticket` is set before anything is submitted, and reset where nothing was: no signal between two
             // Python instructions can part a copy from the entry that holds its tensors.
             py::object ticket = py::cast(Ticket(std::move(mover)));
             entry.attr("ticket") = ticket;
             try {
               ticket.cast<Ticket&>().submit(to_regions(dsts, srcs, sizes_bytes), urgent ? kUrgent : kNormal,
                                             wait_event, record_event);
             } catch (...) {
               entry.attr("ticket") = py::none();
               throw;
             }
             return ticket;
           })
      .def("counters", &counters)
      .def("failed", [](Mover& mover) { return mover.traffic().failed(); })
      .def("stopped", [](Mover& mover) { return mover.traffic().stopping(); })
      .def("close", &Mover::close, py::call_guard<py::gil_scoped_release>());
  m.def("find_overlap", [](const std::vector<uintptr_t>& dsts, const std::vector<uintptr_t>& srcs,
                           const std::vector<int64_t>& sizes_bytes) -> py::object {
    const std::optional<Overlap> overlap = find_overlap(to_regions(dsts, srcs, sizes_bytes));
    if (!overlap) return py::none();
    return py::make_tuple(overlap->dst, overlap->with_dst, overlap->other);
  });
}
