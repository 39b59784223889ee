// CLOCK_MONOTONIC in seconds, the scale of Python's time.monotonic().
#pragma once

#include <ctime>
#include <functional>

namespace kernels {

double now_s();
double thread_cpu_s();

// Returns at `deadline_s` or, when that has passed, at once. Overshoots by a few microseconds (see TimerSlack).
void sleep_until(double deadline_s);

// Sleeps as above and calls `interrupt`, which may throw, some times a second, though not shortly before the deadline.
void sleep_until(double deadline_s, const std::function<void()>& interrupt);

// Sleeps to within a microsecond: wakes early and spins for up to kSpinS, because a virtual machine wakes a thread
// 50-150 us late and back-to-back copies would add that up.
constexpr double kSpinS = 150e-6;
void sleep_exactly_until(double deadline_s);

// Linux delays a thread's timers by up to 50 us to batch wake-ups; paced copies would drift. Restored on destruction.
class TimerSlack {
 public:
  TimerSlack();
  ~TimerSlack();

 private:
  long previous_ns_;
};

}  // namespace kernels
