#include "../routing/race.h"

#include "bindings.h"

namespace kernels {

void bind_routing(py::module_& m) {
  m.def("race_fractions", [](uintptr_t keys, int64_t num_keys, int64_t num_columns, uintptr_t out) {
    race_fractions(pointer_to<uint64_t>(keys), num_keys, num_columns, pointer_to<double>(out));
  });
  m.def("race_by_numbers", [](uintptr_t keys, int64_t num_keys, int64_t num_columns, int64_t k, uintptr_t out) {
    race_by_numbers(pointer_to<uint64_t>(keys), num_keys, num_columns, k, pointer_to<int64_t>(out));
  });
  m.def("race_by_arrivals", [](uintptr_t logs, uintptr_t inverse_rates, int64_t num_keys, int64_t num_columns,
                               int64_t k, uintptr_t out) {
    race_by_arrivals(pointer_to<double>(logs), pointer_to<double>(inverse_rates), num_keys, num_columns, k,
                     pointer_to<int64_t>(out));
  });
}

}  // namespace kernels
