#include "../memory/stream.h"

#include "../link/clock.h"
#include "../link/paced_copy.h"
#include "bindings.h"

namespace kernels {

namespace {

// Ctrl-C ends a long wait of the main thread.
void check_signals() {
  py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("stream_read", [](uintptr_t src, int64_t num_bytes, int num_streams, int num_threads) {
    py::gil_scoped_release unlocked;
    return stream_read(pointer(src), num_bytes, num_streams, default_pool(num_threads));
  });
  m.def("stream_copy", [](uintptr_t dst, uintptr_t src, int64_t num_bytes, int num_threads) {
    py::gil_scoped_release unlocked;
    parallel_stream_copy(pointer(dst), pointer(src), num_bytes, default_pool(num_threads));
  });
  m.def("advise_huge_pages",
        [](uintptr_t address, int64_t num_bytes) { return advise_huge_pages(pointer(address), num_bytes); });
}

void bind_link(py::module_& m) {
  m.def("paced_copy", [](uintptr_t dst, uintptr_t src, int64_t num_bytes, double rate_bytes_s, double deadline_s) {
    py::gil_scoped_release unlocked;
    return paced_copy(pointer(dst), pointer(src), num_bytes, rate_bytes_s, deadline_s, check_signals);
  });
  m.def("sleep_until", [](double deadline_s) {
    py::gil_scoped_release unlocked;
    TimerSlack slack;
    sleep_until(deadline_s, check_signals);
  });
  m.def("thread_cpu_s", &thread_cpu_s);
}

}  // namespace kernels
