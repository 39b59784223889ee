#include "../pool/thread_pool.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace kernels {

void bind_pool(py::module_& m) {
  py::class_<ThreadPool>(m, "ThreadPool")
      .def(py::init<int, std::vector<int>>())
      .def("size", &ThreadPool::size)
      .def("cores_in_use", [](ThreadPool& pool) {
        std::vector<int> cores(size_t(pool.size()));
        py::gil_scoped_release unlocked;
        pool.run([&](int i) { cores[size_t(i)] = current_core(); });
        return cores;
      });
}

}  // namespace kernels
