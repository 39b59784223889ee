// Which earlier ops a new one follows, over Python's tickets: harness/machine/hazards.py says what it means, and keeps
// all that is rare.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "field.h"

namespace kernels::ties {

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

inline py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

inline py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

// What is kept by the keys that an op touches, for one that comes again. It holds as long as no key is dropped.
struct Touches {
  bool are_known = false;
  std::vector<py::object> read, written;
};

class Dependencies {
 public:
  // A ticket of nothing, which new ones are copies of; the type of what is kept by key; states of tickets; the least
  // length at which readers are sifted.
  Dependencies(py::object blank, py::object touched, py::object done, py::object cancelled, py::object sift_from)
      : blank_(std::move(blank)), ticket_type_(py::type::of(blank_)), touched_type_(std::move(touched)),
        done_(std::move(done)), cancelled_(std::move(cancelled)), sift_from_(std::move(sift_from)),
        op_(ticket_type_, "op"), lane_(ticket_type_, "lane"), urgent_(ticket_type_, "urgent"),
        is_done_(ticket_type_, "done"),
        number_(ticket_type_, "number"), stamp_(ticket_type_, "stamp"), state_(ticket_type_, "state"),
        num_unmet_(ticket_type_, "num_unmet"), waits_for_(ticket_type_, "waits_for"),
        dependents_(ticket_type_, "dependents"), writer_(touched_type_, "writer"),
        readers_(touched_type_, "readers"), overlapping_(touched_type_, "overlapping"),
        sift_at_(touched_type_, "sift_at") {
    for (py::handle name : ticket_type_.attr("__slots__"))
      slots_.emplace_back(ticket_type_, py::cast<std::string>(name).c_str());
  }

  // Makes the ticket of a submission.
  py::object ticket_of(py::handle op, py::handle lane, int64_t number, bool urgent) const {
    auto* const type = reinterpret_cast<PyTypeObject*>(ticket_type_.ptr());
    const py::object made = owned(type->tp_alloc(type, 0));
    for (const Field& slot : slots_) slot.set(made.ptr(), borrowed(slot.get(blank_.ptr())));
    op_.set(made.ptr(), borrowed(op.ptr()));
    lane_.set(made.ptr(), borrowed(lane.ptr()));
    number_.set(made.ptr(), py::int_(number));
    urgent_.set(made.ptr(), py::bool_(urgent));
    return made;
  }

  // Makes the ticket of an op that counts as over, and ties it: (ticket, the sorted numbers of those that it follows).
  // Among these are the ones given as `before`, but for those below 0.
  py::tuple record(py::handle hazards, const py::dict& keys, py::handle op, py::handle lane, int64_t number,
                   bool urgent, py::handle after, const std::vector<int64_t>& before) const {
    py::object ticket = ticket_of(op, lane, number, urgent);
    std::vector<int64_t> found;
    for (const int64_t one : before)
      if (one >= 0) found.push_back(one);
    const py::object followed = followed_by(hazards, keys, ticket, after, nullptr);
    for (Py_ssize_t i = 0; followed && i < PyList_GET_SIZE(followed.ptr()); ++i)
      found.push_back(PyLong_AsLongLong(number_.get(PyList_GET_ITEM(followed.ptr(), i))));
    if (PyErr_Occurred()) throw py::error_already_set();
    is_done_.set(ticket.ptr(), py::bool_(true));
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    py::tuple numbers(found.size());
    for (size_t i = 0; i < found.size(); ++i) numbers[i] = found[i];
    return py::make_tuple(std::move(ticket), std::move(numbers));
  }

  // Ties the ticket to what must come first, and notes in `keys` what its op touches.
  void tie(py::handle hazards, const py::dict& keys, py::handle ticket, py::handle after) const {
    const py::object found = followed_by(hazards, keys, ticket, after, nullptr);
    if (found) link(found, ticket.ptr(), hazards);
  }

  // The same for an op that comes again: what it touches is kept, or taken from there once it is known.
  void tie_again(py::handle hazards, const py::dict& keys, py::handle ticket, py::handle after,
                 Touches& touches) const {
    const py::object found = followed_by(hazards, keys, ticket, after, &touches);
    if (found) link(found, ticket.ptr(), hazards);
  }

 private:
  struct Submission {
    Submission(PyObject* ticket, const Field& number) : ticket(ticket), number(number.get(ticket)) {}
    PyObject *const ticket, *const number;  // the number is the same object in every ticket that it has stamped
    py::object found;                       // a list of tickets, once there is one
  };

  // Notes in `keys` what the ticket's op touches. Returns a list of what must come first; null where there is nothing.
  py::object followed_by(py::handle hazards, const py::dict& keys, py::handle ticket, py::handle after,
                         Touches* touches) const {
    static PyObject *const reads = PyUnicode_InternFromString("reads"),
                           *const writes = PyUnicode_InternFromString("writes");
    Submission it(checked(ticket.ptr(), ticket_type_), number_);
    stamp(it, it.ticket);  // it does not wait for itself
    const Entries given(after.ptr());
    for (Py_ssize_t i = 0; i < given.size(); ++i) {
      PyObject* const one = checked(given[i], ticket_type_);
      if (!is_stamped(it, one) && !is_done(one)) follow(it, one);
    }
    if (touches && touches->are_known) {
      for (const py::object& one : touches->read) add_read(it, hazards, one.ptr());
      for (const py::object& one : touches->written) add_write(it, one.ptr());
      return it.found;
    }
    PyObject* const op = op_.get(it.ticket);
    const py::object its_reads = owned(PyObject_GetAttr(op, reads)), its_writes = owned(PyObject_GetAttr(op, writes));
    const Entries read(its_reads.ptr()), written(its_writes.ptr());
    if (touches) *touches = {};
    for (Py_ssize_t i = 0; i < read.size(); ++i) {
      py::object one = touched(hazards, keys, read[i]);
      add_read(it, hazards, one.ptr());
      if (touches) touches->read.push_back(std::move(one));
    }
    for (Py_ssize_t i = 0; i < written.size(); ++i) {
      py::object one = touched(hazards, keys, written[i]);
      add_write(it, one.ptr());
      if (touches) touches->written.push_back(std::move(one));
    }
    if (touches) touches->are_known = true;
    return it.found;
  }

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
    if (PyList_GET_SIZE(readers_.get(touched)) >= PyLong_AsSsize_t(sift_at_.get(touched))) sift(hazards, touched);
    append(readers_.get(touched), it.ticket);
  }

  // Drops readers that are done: keys that are never written must not keep all their readers alive.
  void sift(py::handle hazards, PyObject* touched) const {
    py::object left = owned(PyList_New(0));
    bool any_cancelled = false;
    PyObject* const readers = readers_.get(touched);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(readers); ++i) {
      PyObject* const reader = PyList_GET_ITEM(readers, i);
      if (is_done(reader)) continue;
      any_cancelled = any_cancelled || state_.get(reader) == cancelled_.ptr();
      append(left.ptr(), reader);
    }
    if (any_cancelled) left = hazards.attr("_unsettled")(left);
    const Py_ssize_t twice = 2 * PyList_GET_SIZE(left.ptr());
    readers_.set(touched, left);
    sift_at_.set(touched, py::int_(std::max(twice, PyLong_AsSsize_t(sift_from_.ptr()))));
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
  void link(py::object follows, PyObject* ticket, py::handle hazards) const {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(follows.ptr()); ++i)
      if (state_.get(PyList_GET_ITEM(follows.ptr(), i)) == cancelled_.ptr()) {
        follows = hazards.attr("_unsettled")(follows);
        break;
      }
    PyObject* const found = follows.ptr();
    const Py_ssize_t count = PyList_GET_SIZE(found);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const one = PyList_GET_ITEM(found, i);
      if (dependents_.get(one) == Py_None) dependents_.set(one, owned(PyList_New(0)));
      append(dependents_.get(one), ticket);
    }
    if (!count) return;
    num_unmet_.set(ticket, py::int_(count));
    waits_for_.set(ticket, follows);
  }

  const py::object blank_, ticket_type_, touched_type_, done_, cancelled_, sift_from_;
  std::vector<Field> slots_;  // all of a ticket
  const Field op_, lane_, urgent_, is_done_, number_, stamp_, state_;  // among these, as those that follow
  const Field num_unmet_, waits_for_, dependents_;
  const Field writer_, readers_, overlapping_, sift_at_;                          // of what is kept by key
};

}  // namespace kernels::ties
