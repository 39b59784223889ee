// The event loop knows this about an op: its place, its size, and how far it has come.
#pragma once

#include <cstdint>

namespace kernels::simulation {

// The work of a whole op, or of a piece of it.
struct Work {
  double flops = 0, device_bytes = 0, host_bytes = 0, link_bytes = 0;

  Work operator*(double by) const { return {flops * by, device_bytes * by, host_bytes * by, link_bytes * by}; }
};

struct TapeOp;

// One submitted op until it settles. The submitter owns it and keeps it where it is.
struct Task {
  void* ticket = nullptr;  // the owner's name for it
  const TapeOp* of_tape = nullptr;  // where it was submitted as one of a tape
  int64_t number = 0;      // in the order of submission
  int32_t lane = 0;
  int32_t packets = 1;  // of a piece
  int32_t pieces = 1;   // equal ones, which run one after another and cost what ops of their own would
  bool urgent = false;
  bool ready = false;      // nothing it depends on is open
  double submitted_s = 0;  // it does not begin before
  double launchable_s = 0;  // on a lane that launches ahead: the host does not launch it before

  // From its beginning on.
  Work work;           // of the piece
  double alone_s = 0;  // the piece's seconds at full speed
  double late_s = 0;   // for so long it has its lane before it does anything; 0 once it has the lane
  int32_t layer = 0, micro_batch = 0;
  uint16_t kind = 0;
  int32_t pieces_done = 0;
  int32_t packets_done = 0;    // of the piece, before the span that runs or comes next
  bool piece_begins = false;   // a piece behind the first has not begun yet
  double launched_s = -1;      // where lanes launch ahead: when the host has launched it
};

}  // namespace kernels::simulation
