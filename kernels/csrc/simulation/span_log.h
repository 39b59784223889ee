// Records what ran: every run of packets in 88 bytes, and sums by lane and kind of op.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "task.h"

namespace kernels::simulation {

// The row as numpy reads it: harness/machine/virtual/span_log.py has the same columns.
struct SpanRow {
  int64_t ticket;
  double start_s, end_s;
  Work work;  // of the whole op
  int32_t layer, micro_batch, packet, count, num_packets;
  uint16_t lane, kind;
  bool urgent;
  uint8_t unused[7];  // zero, so that equal rows have equal bytes
};
static_assert(sizeof(SpanRow) == 88);

struct Totals {
  int64_t num_ops = 0;  // that have ended
  double busy_s = 0;
  Work work;

  // `part` of the work is counted.
  void add(bool ended, double seconds, const Work& of, double part) {
    num_ops += ended;
    busy_s += seconds;
    work.flops += of.flops * part;
    work.device_bytes += of.device_bytes * part;
    work.host_bytes += of.host_bytes * part;
    work.link_bytes += of.link_bytes * part;
  }
};

class SpanLog {
 public:
  explicit SpanLog(bool keeps_rows) : keeps_rows_(keeps_rows) {}

  bool keeps_rows() const { return keeps_rows_; }
  // `count` packets from number `task.packets_done` on ran without a break.
  void record(const Task& task, int32_t count, double start_s, double end_s);
  size_t num_rows() const { return num_rows_; }
  // Rows `first` to `last` - 1, one after the other, into memory for as many.
  void copy(size_t first, size_t last, char* to) const;
  // By lane, by kind.
  const std::vector<std::vector<Totals>>& totals() const { return totals_; }
  void clear();

 private:
  static constexpr size_t kRowsPerChunk = 1 << 14;

  bool keeps_rows_;
  size_t num_rows_ = 0;
  std::vector<std::unique_ptr<SpanRow[]>> chunks_;  // growing must not copy
  std::vector<std::vector<Totals>> totals_;
};

}  // namespace kernels::simulation
