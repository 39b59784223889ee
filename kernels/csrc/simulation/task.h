// The event loop knows this about an op: its place, its size, and how far it has come.
#pragma once

#include <cstdint>

namespace kernels::simulation {

// The work of a whole op.
struct Work {
  double flops = 0, device_bytes = 0, host_bytes = 0, link_bytes = 0;
};

// One submitted op until it settles. The submitter owns it and keeps it where it is.
struct Task {
  void* ticket = nullptr;  // the owner's name for it
  int64_t number = 0;      // in the order of submission
  int32_t lane = 0;
  int32_t packets = 1;
  bool urgent = false;
  bool ready = false;      // nothing it depends on is open
  double submitted_s = 0;  // it does not begin before

  // From its beginning on.
  Work work;
  double alone_s = 0;  // at full speed
  int32_t layer = 0, micro_batch = 0;
  uint16_t kind = 0;
  int32_t packets_done = 0;  // before the span that runs or comes next
};

}  // namespace kernels::simulation
