// The Python border: one bind function a concept. Arguments are sizes, addresses, types and strides that kernels/*.py
// has validated, in the order of its quick tests (quick.cpp); errors that only the data can show are raised by the
// kernels as std::invalid_argument (ValueError).
#pragma once

#include <pybind11/pybind11.h>

#include "../pool/thread_pool.h"

namespace py = pybind11;

namespace kernels {

constexpr int kInt32 = 3, kInt64 = 4;  // the numbers of kernels/_tensors.py that follow those of DType

inline void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

template <class T>
T* pointer_to(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_quick(py::module_& m);
void bind_attention(py::module_& m);
void bind_cache(py::module_& m);
void bind_linear(py::module_& m);
void bind_ffn(py::module_& m);
void bind_memory(py::module_& m);
void bind_link(py::module_& m);
void bind_fields(py::module_& m);
void bind_dependencies(py::module_& m);
void bind_routing(py::module_& m);

}  // namespace kernels
