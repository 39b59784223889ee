#pragma once

#include <pybind11/pybind11.h>

void bind_mover(pybind11::module_& m);
