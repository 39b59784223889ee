#include "paced_copy.h"

#include <algorithm>

#include "../memory/stream.h"
#include "clock.h"

namespace kernels {

namespace {

// The hand-over from one copy to the next through Python takes 50-100 us after a large copy emptied the caches. A link
// with a queue has no such gap: a copy that comes so soon after the link became free starts at that moment, and the
// link still never carries more than rate * time. Bounded by a share of the copy, so that small ones stay true.
double link_start_s(double free_s, double duration_s) {
  const double late_s = now_s() - free_s;
  return late_s <= std::min(150e-6, 0.1 * duration_s) ? free_s : free_s + late_s;
}

}  // namespace

double paced_copy(void* dst, const void* src, int64_t num_bytes, double rate_bytes_s, double start_s,
                  const std::function<void()>& interrupt) {
  TimerSlack slack;
  sleep_until(start_s, interrupt);
  const double start = link_start_s(start_s, rate_bytes_s > 0 ? double(num_bytes) / rate_bytes_s : 0);
  double copied_s = start;
  double free_s = start;
  for (int64_t done = 0; done < num_bytes; done += kPacingChunkBytes) {
    const int64_t chunk = std::min(kPacingChunkBytes, num_bytes - done);
    stream_copy(static_cast<char*>(dst) + done, static_cast<const char*>(src) + done, chunk);
    copied_s = now_s();
    if (rate_bytes_s <= 0) continue;
    free_s = start + double(done + chunk) / rate_bytes_s;
    // A late wake-up between chunks is made up for by the next, one after the last would delay the link's next user.
    sleep_until(free_s - kSpinS, interrupt);
    if (done + chunk < num_bytes)
      sleep_until(free_s);
    else
      sleep_exactly_until(free_s);
  }
  return std::max(free_s, copied_s);
}

}  // namespace kernels
