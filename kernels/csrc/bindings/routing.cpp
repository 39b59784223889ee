#include "../routing/draw.h"

#include "bindings.h"

namespace kernels {

void bind_routing(py::module_& m) {
  m.def("draw_evenly", [](uintptr_t keys, int64_t num_keys, int64_t num_columns, int64_t k, uintptr_t out) {
    draw_evenly(pointer_to<uint64_t>(keys), num_keys, num_columns, k, pointer_to<int64_t>(out));
  });
  m.def("draw_by_weight", [](uintptr_t keys, uintptr_t tails, int64_t num_keys, int64_t num_columns, int64_t k,
                             uintptr_t out) {
    draw_by_weight(pointer_to<uint64_t>(keys), pointer_to<double>(tails), num_keys, num_columns, k,
                   pointer_to<int64_t>(out));
  });
}

}  // namespace kernels
