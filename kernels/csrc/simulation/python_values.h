// Attributes and values of Python's objects in C++.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "task.h"

namespace kernels::simulation {

namespace py = pybind11;

constexpr int32_t kNone = -1;  // a layer or micro-batch that an op does not have

inline PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

inline py::object attribute(PyObject* of, PyObject* name) {
  PyObject* value = PyObject_GetAttr(of, name);
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

inline int64_t whole(PyObject* value) {
  const int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
  return number;
}

inline int32_t number_or_none(PyObject* of, PyObject* name) {
  const py::object value = attribute(of, name);
  return value.is_none() ? kNone : static_cast<int32_t>(whole(value.ptr()));
}

inline double real(PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return number;
}

inline Work to_work(const py::object& work) {
  if (!PyTuple_Check(work.ptr()) || PyTuple_GET_SIZE(work.ptr()) != 4) throw py::type_error("work() must be a Work");
  PyObject* all = work.ptr();
  return {real(PyTuple_GET_ITEM(all, 0)), real(PyTuple_GET_ITEM(all, 1)), real(PyTuple_GET_ITEM(all, 2)),
          real(PyTuple_GET_ITEM(all, 3))};
}

inline py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

}  // namespace kernels::simulation
