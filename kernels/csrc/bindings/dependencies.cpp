// Which earlier ops a new one follows, over Python's tickets: harness/machine/hazards.py says what it means, and keeps
// all that is rare.
#include "../core/field.h"

#include "bindings.h"

namespace {

using kernels::Field;

// The entries of a sequence, which stays alive meanwhile.
class Entries {
 public:
  explicit Entries(PyObject* of) : items_(PySequence_Fast(of, "must be iterable")) {
    if (!items_) throw py::error_already_set();
  }
  ~Entries() { Py_DECREF(items_); }
  Entries(const Entries&) = delete;
  Entries& operator=(const Entries&) = delete;

  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(items_); }
  PyObject* operator[](Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(items_, i); }

 private:
  PyObject* const items_;
};

py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

class Dependencies {
 public:
  // Types of tickets and of what is kept by key; states of tickets; the least length at which readers are sifted.
  Dependencies(py::object ticket, py::object touched, py::object done, py::object cancelled, py::object sift_from)
      : ticket_type_(std::move(ticket)), touched_type_(std::move(touched)), done_(std::move(done)),
        cancelled_(std::move(cancelled)), sift_from_(std::move(sift_from)), op_(ticket_type_, "op"),
        number_(ticket_type_, "number"), stamp_(ticket_type_, "stamp"), state_(ticket_type_, "state"),
        num_unmet_(ticket_type_, "num_unmet"), waits_for_(ticket_type_, "waits_for"),
        dependents_(ticket_type_, "dependents"), writer_(touched_type_, "writer"),
        readers_(touched_type_, "readers"), overlapping_(touched_type_, "overlapping"),
        sift_at_(touched_type_, "sift_at") {}

  // Ties the ticket to what must come first, and notes in `keys` what its op touches.
  void tie(py::handle hazards, const py::dict& keys, py::handle ticket, py::handle after) const {
    static PyObject *const reads = PyUnicode_InternFromString("reads"),
                           *const writes = PyUnicode_InternFromString("writes");
    Submission it(checked(ticket.ptr(), ticket_type_), number_);
    stamp(it, it.ticket);  // it does not wait for itself
    const Entries given(after.ptr());
    for (Py_ssize_t i = 0; i < given.size(); ++i) {
      PyObject* const one = checked(given[i], ticket_type_);
      if (!is_stamped(it, one) && !is_done(one)) follow(it, one);
    }
    PyObject* const op = op_.get(it.ticket);
    const py::object its_reads = owned(PyObject_GetAttr(op, reads)), its_writes = owned(PyObject_GetAttr(op, writes));
    const Entries read(its_reads.ptr()), written(its_writes.ptr());
    for (Py_ssize_t i = 0; i < read.size(); ++i) add_read(it, hazards, touched(hazards, keys, read[i]).ptr());
    for (Py_ssize_t i = 0; i < written.size(); ++i) add_write(it, touched(hazards, keys, written[i]).ptr());
    if (it.found) link(it, hazards);
  }

 private:
  struct Submission {
    Submission(PyObject* ticket, const Field& number) : ticket(ticket), number(number.get(ticket)) {}
    PyObject *const ticket, *const number;  // the number is the same object in every ticket that it has stamped
    py::object found;                       // a list of tickets, once there is one
  };

  static PyObject* checked(PyObject* object, const py::object& type) {
    if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(type.ptr()))
      throw py::type_error("needs a " + std::string(py::str(type.attr("__name__"))));
    return object;
  }

  bool is_stamped(const Submission& it, PyObject* ticket) const { return stamp_.get(ticket) == it.number; }
  bool is_done(PyObject* ticket) const { return state_.get(ticket) == done_.ptr(); }
  void stamp(const Submission& it, PyObject* ticket) const {
    stamp_.set(ticket, py::reinterpret_borrow<py::object>(it.number));
  }

  void follow(Submission& it, PyObject* ticket) const {
    stamp(it, ticket);
    if (is_done(ticket)) return;
    if (!it.found) it.found = owned(PyList_New(0));
    append(it.found.ptr(), ticket);
  }

  // A ticket or None.
  void follow_once(Submission& it, PyObject* ticket) const {
    if (ticket != Py_None && !is_stamped(it, ticket)) follow(it, ticket);
  }

  static void append(PyObject* list, PyObject* item) {
    if (PyList_Append(list, item)) throw py::error_already_set();
  }

  py::object touched(py::handle hazards, const py::dict& keys, PyObject* key) const {
    PyObject* const known = PyDict_GetItemWithError(keys.ptr(), key);
    if (!known && PyErr_Occurred()) throw py::error_already_set();
    const auto found = known ? py::reinterpret_borrow<py::object>(known) : hazards.attr("_add_key")(py::handle(key));
    checked(found.ptr(), touched_type_);
    return found;
  }

  void add_read(Submission& it, py::handle hazards, PyObject* touched) const {
    PyObject* const writer = writer_.get(touched);
    if (writer != Py_None && is_done(writer)) {
      writer_.set(touched, py::none());
    } else {
      follow_once(it, writer);
    }
    const Entries others(overlapping_.get(touched));
    for (Py_ssize_t i = 0; i < others.size(); ++i) follow_once(it, writer_.get(others[i]));
    if (PyList_GET_SIZE(readers_.get(touched)) >= PyLong_AsSsize_t(sift_at_.get(touched)))
      hazards.attr("_sift")(py::handle(touched));
    append(readers_.get(touched), it.ticket);
  }

  void add_write(Submission& it, PyObject* touched) const {
    const auto readers = py::reinterpret_borrow<py::object>(readers_.get(touched));
    if (PyList_GET_SIZE(readers.ptr())) {  // who read the key since its last write ran after that write
      follow_all(it, readers.ptr());
    } else {
      follow_once(it, writer_.get(touched));
    }
    const Entries others(overlapping_.get(touched));  // the last writer may have written more than what was read since
    for (Py_ssize_t i = 0; i < others.size(); ++i) {
      follow_all(it, readers_.get(others[i]));
      follow_once(it, writer_.get(others[i]));
    }
    writer_.set(touched, py::reinterpret_borrow<py::object>(it.ticket));
    if (PyList_SetSlice(readers.ptr(), 0, PyList_GET_SIZE(readers.ptr()), nullptr)) throw py::error_already_set();
    sift_at_.set(touched, sift_from_);
  }

  void follow_all(Submission& it, PyObject* list) const {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) follow_once(it, PyList_GET_ITEM(list, i));
  }

  // Makes the ticket wait for those that were found; for what a cancelled one followed, in its place.
  void link(Submission& it, py::handle hazards) const {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(it.found.ptr()); ++i)
      if (state_.get(PyList_GET_ITEM(it.found.ptr(), i)) == cancelled_.ptr()) {
        it.found = hazards.attr("_unsettled")(it.found);
        break;
      }
    PyObject* const found = it.found.ptr();
    const Py_ssize_t count = PyList_GET_SIZE(found);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const one = PyList_GET_ITEM(found, i);
      if (dependents_.get(one) == Py_None) dependents_.set(one, owned(PyList_New(0)));
      append(dependents_.get(one), it.ticket);
    }
    if (!count) return;
    num_unmet_.set(it.ticket, py::int_(count));
    waits_for_.set(it.ticket, it.found);
  }

  const py::object ticket_type_, touched_type_, done_, cancelled_, sift_from_;
  const Field op_, number_, stamp_, state_, num_unmet_, waits_for_, dependents_;  // of a ticket
  const Field writer_, readers_, overlapping_, sift_at_;                          // of what is kept by key
};

}  // namespace

namespace kernels {

void bind_dependencies(py::module_& m) {
  py::class_<Dependencies>(m, "Dependencies")
      .def(py::init<py::object, py::object, py::object, py::object, py::object>(), py::kw_only(), py::arg("ticket"),
           py::arg("touched"), py::arg("done"), py::arg("cancelled"), py::arg("sift_from"))
      .def("tie", &Dependencies::tie);
}

}  // namespace kernels
