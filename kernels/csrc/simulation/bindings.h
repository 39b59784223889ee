#pragma once

#include <pybind11/pybind11.h>

namespace kernels {

void bind_simulation(pybind11::module_& m);

}  // namespace kernels
