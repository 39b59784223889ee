// What one priority class has carried so far.
#pragma once

#include <cstdint>

namespace kernels {

class ClassCounters {
 public:
  int64_t num_requests = 0, num_done = 0, num_failed = 0, num_cancelled = 0, num_packets = 0, num_bytes = 0;

  // Packets of one class may overlap in time; a moment with any of them under way is busy once.
  void packet_began(double start_s) {
    if (num_active_++ == 0) busy_since_s_ = start_s;
  }
  void packet_ended(double finish_s) {
    if (--num_active_ == 0) busy_s_ += finish_s - busy_since_s_;
  }
  double busy_s(double now_s) const { return busy_s_ + (num_active_ > 0 ? now_s - busy_since_s_ : 0.0); }

 private:
  int num_active_ = 0;
  double busy_since_s_ = 0, busy_s_ = 0;
};

}  // namespace kernels
