// The fields of a Python ticket, read and written where they lie. Class `Ticket` has __slots__; a slot's descriptor
// knows its place in every instance, and going there takes a tenth of the time of an attribute look-up.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <string>

namespace kernels::simulation {

namespace py = pybind11;

class Field {
 public:
  Field(py::handle type, const char* name) {
    const py::object descriptor = type.attr(name);
    if (Py_TYPE(descriptor.ptr()) != &PyMemberDescr_Type)
      throw py::type_error("Ticket." + std::string(name) + " must be a slot");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
  }

  // Borrowed; null where it was never set.
  PyObject* get(PyObject* ticket) const { return *at(ticket); }

  void set(PyObject* ticket, py::object value) const {
    PyObject* old = *at(ticket);
    *at(ticket) = value.release().ptr();
    Py_XDECREF(old);  // last: it may run any code
  }

 private:
  PyObject** at(PyObject* ticket) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(ticket) + offset_);
  }

  Py_ssize_t offset_;
};

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
