// A link's time, given to packets in their order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kernels {

// A link that has work carries `rate_bytes_s` by absolute deadlines: a packet's time begins where the last one's ended,
// not when its thread woke up. What a late thread may make up for is bounded, so over any time t the link carries at
// most rate * (t + catch_up) and the packets in flight.
class Pacer {
 public:
  Pacer(double rate_bytes_s, double catch_up_s) : rate_bytes_s_(rate_bytes_s), catch_up_s_(catch_up_s) {}

  bool paced() const { return rate_bytes_s_ > 0; }

  // When a packet that was ready at `ready_s` (not after `now_s`) starts; the link is its own for num_bytes / rate.
  double reserve(int64_t num_bytes, double ready_s, double now_s) {
    const double start_s = std::max({free_s_, ready_s, now_s - catch_up_s_});
    free_s_ = start_s + double(num_bytes) / rate_bytes_s_;
    return start_s;
  }

  double free_s() const { return free_s_; }

 private:
  double rate_bytes_s_, catch_up_s_;
  double free_s_ = 0;
};

}  // namespace kernels
