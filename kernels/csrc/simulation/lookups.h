// What is asked of Python's ops and lanes once, and then known by their address.
#pragma once

#include <pybind11/pybind11.h>

#include <unordered_map>
#include <utility>

namespace kernels::simulation {

namespace py = pybind11;

// Whether an op's class has a method of its own in place of a base class's. Classes are kept alive.
class OwnMethods {
 public:
  OwnMethods(const char* name, py::object of_base) : name_(name), of_base_(std::move(of_base)) {}

  bool has(PyObject* op) {
    PyTypeObject* const type = Py_TYPE(op);
    const auto found = known_.find(type);
    if (found != known_.end()) return found->second;
    auto* const object = reinterpret_cast<PyObject*>(type);
    const py::object its = py::handle(object).attr(name_);
    Py_INCREF(object);
    return known_[type] = !its.is(of_base_);
  }

  void clear() {
    for (const auto& entry : known_) Py_DECREF(reinterpret_cast<PyObject*>(entry.first));
    known_.clear();
  }

 private:
  const char* const name_;
  const py::object of_base_;
  std::unordered_map<PyTypeObject*, bool> known_;
};

// Ids of lanes. Hashing a lane takes a tenth of a submission, so that lanes are known by their address, too; equal ones
// have one id. Lanes are kept alive.
class LaneIds {
 public:
  // `add` makes an id for a new lane.
  template <class Add>
  int of(PyObject* lane, const Add& add) {
    constexpr size_t kMost = 256;
    const auto known = by_address_.find(lane);
    if (known != by_address_.end()) return known->second;
    const py::handle it(lane);
    if (!ids_.contains(it)) ids_[it] = add(it);
    const int id = py::cast<int>(ids_[it]);
    if (by_address_.size() < kMost) {
      Py_INCREF(lane);
      by_address_[lane] = id;
    }
    return id;
  }

  void clear() {
    for (const auto& entry : by_address_) Py_DECREF(entry.first);
    by_address_.clear();
  }

 private:
  py::dict ids_;
  std::unordered_map<PyObject*, int> by_address_;
};

}  // namespace kernels::simulation
