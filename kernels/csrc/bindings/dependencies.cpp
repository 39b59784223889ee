#include "../core/dependencies.h"

#include <pybind11/stl.h>

#include <memory>

#include "bindings.h"

namespace kernels {

void bind_dependencies(py::module_& m) {
  using ties::Dependencies;
  py::class_<Dependencies, std::shared_ptr<Dependencies>>(m, "Dependencies")
      .def(py::init<py::object, py::object, py::object, py::object, py::object>(), py::kw_only(), py::arg("blank"),
           py::arg("touched"), py::arg("done"), py::arg("cancelled"), py::arg("sift_from"))
      .def("tie", &Dependencies::tie)
      .def("record", &Dependencies::record);
}

}  // namespace kernels
