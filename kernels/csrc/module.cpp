// The extension module kernels._native; its functions are described where kernels/*.py calls them.
#include "bindings/bindings.h"
#include "core/isa.h"
#include "simulation/bindings.h"

PYBIND11_MODULE(_native, m) {
  using namespace kernels;
  bind_quick(m);
  bind_attention(m);
  bind_cache(m);
  bind_linear(m);
  bind_ffn(m);
  bind_memory(m);
  bind_link(m);
  bind_fields(m);
  bind_dependencies(m);
  bind_routing(m);
  bind_simulation(m);
  m.def("isa", [] { return isa_name(current_isa()); });
  m.def("vector_isa", [] { return isa_name(current_vector_isa()); });
  m.def("set_isa", &set_isa);
  m.def("supported_isas", [] {
    py::list names;
    for (Isa isa : kIsas)
      if (isa_supported(isa)) names.append(isa_name(isa));
    return names;
  });
}
