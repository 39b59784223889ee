// Fields of many Python objects of one class in one call: kernels/fields.py says what each function does.
#include "../core/field.h"

#include <optional>
#include <string>

#include "bindings.h"

namespace {

using kernels::Field;

// All `objects`, a list or tuple, and the field of that name. They must be of one class.
class Fields {
 public:
  Fields(const py::handle& objects, const char* name) : objects_(objects), name_(name) {
    if (!PyList_CheckExact(objects.ptr()) && !PyTuple_CheckExact(objects.ptr()))
      throw py::type_error("objects must be in a list or tuple");
    if (const Py_ssize_t n = size()) {
      type_ = Py_TYPE(object(0));
      for (Py_ssize_t i = 1; i < n; ++i)
        if (Py_TYPE(object(i)) != type_) throw py::type_error("objects must be of one class");
      field_.emplace(py::handle(reinterpret_cast<PyObject*>(type_)), name);
    }
  }

  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(objects_.ptr()); }

  // Borrowed.
  PyObject* get(Py_ssize_t i) const {
    PyObject* const value = field_->get(object(i));
    if (!value) throw py::attribute_error(name_);
    return value;
  }

  PyObject* list(Py_ssize_t i) const {
    PyObject* const value = get(i);
    if (!PyList_CheckExact(value)) throw py::type_error(name_ + " must be a list");
    return value;
  }

  void set(Py_ssize_t i, PyObject* value) const { field_->set(object(i), py::reinterpret_borrow<py::object>(value)); }

 private:
  PyObject* object(Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(objects_.ptr(), i); }

  py::handle objects_;
  std::string name_;
  PyTypeObject* type_ = nullptr;
  std::optional<Field> field_;
};

int64_t whole(PyObject* value) {
  const int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
  return number;
}

void values(py::handle objects, const char* name, uintptr_t to) {
  const Fields fields(objects, name);
  auto* out = kernels::pointer_to<int64_t>(to);
  for (Py_ssize_t i = 0; i < fields.size(); ++i) out[i] = whole(fields.get(i));
}

void lengths(py::handle objects, const char* name, uintptr_t to) {
  const Fields fields(objects, name);
  auto* out = kernels::pointer_to<int64_t>(to);
  for (Py_ssize_t i = 0; i < fields.size(); ++i) out[i] = PyList_GET_SIZE(fields.list(i));
}

// `to` has room for the sum of `counts`, one for each list.
void lists_joined(const py::list& lists, uintptr_t counts, uintptr_t to) {
  const auto* count = kernels::pointer_to<int64_t>(counts);
  auto* out = kernels::pointer_to<int64_t>(to);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists.ptr()); ++i) {
    PyObject* const list = PyList_GET_ITEM(lists.ptr(), i);
    if (!PyList_CheckExact(list)) throw py::type_error("what is joined must be lists");
    if (PyList_GET_SIZE(list) < count[i]) throw py::index_error("a list is shorter than its count");
    for (Py_ssize_t j = 0; j < count[i]; ++j) *out++ = whole(PyList_GET_ITEM(list, j));
  }
}

void last(py::handle objects, const char* name, uintptr_t to) {
  const Fields fields(objects, name);
  auto* out = kernels::pointer_to<int64_t>(to);
  for (Py_ssize_t i = 0; i < fields.size(); ++i) {
    PyObject* const list = fields.list(i);
    const Py_ssize_t length = PyList_GET_SIZE(list);
    if (!length) throw py::index_error(std::string(name) + " is empty");
    out[i] = whole(PyList_GET_ITEM(list, length - 1));
  }
}

void assign(py::handle objects, const char* name, const py::list& to) {
  const Fields fields(objects, name);
  if (static_cast<Py_ssize_t>(to.size()) != fields.size()) throw py::value_error("one value for each object");
  for (Py_ssize_t i = 0; i < fields.size(); ++i) fields.set(i, PyList_GET_ITEM(to.ptr(), i));
}

void append(py::handle objects, const char* name, const py::list& entries) {
  const Fields fields(objects, name);
  if (static_cast<Py_ssize_t>(entries.size()) != fields.size()) throw py::value_error("one entry for each object");
  for (Py_ssize_t i = 0; i < fields.size(); ++i)
    if (PyList_Append(fields.list(i), PyList_GET_ITEM(entries.ptr(), i))) throw py::error_already_set();
}

}  // namespace

namespace kernels {

void bind_fields(py::module_& m) {
  m.def("field_values", &values);
  m.def("field_lengths", &lengths);
  m.def("lists_joined", &lists_joined);
  m.def("field_last", &last);
  m.def("field_assign", &assign);
  m.def("field_append", &append);
}

}  // namespace kernels
