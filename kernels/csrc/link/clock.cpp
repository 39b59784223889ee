#include "clock.h"

#include <emmintrin.h>
#include <sys/prctl.h>

#include <cerrno>
#include <cmath>

namespace kernels {
namespace {

double read_clock_s(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

}  // namespace

double now_s() { return read_clock_s(CLOCK_MONOTONIC); }

double thread_cpu_s() { return read_clock_s(CLOCK_THREAD_CPUTIME_ID); }

void sleep_until(double deadline_s) {
  if (!(deadline_s > now_s())) return;
  timespec time;
  const double seconds = std::floor(deadline_s);
  time.tv_sec = time_t(seconds);
  time.tv_nsec = long((deadline_s - seconds) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) {
  }
}

void sleep_until(double deadline_s, const std::function<void()>& interrupt) {
  constexpr double kSliceS = 0.05;
  for (double now = now_s(); deadline_s - now > 2 * kSliceS; now = now_s()) {
    sleep_until(now + kSliceS);
    interrupt();
  }
  sleep_until(deadline_s);
}

void sleep_exactly_until(double deadline_s) {
  sleep_until(deadline_s - kSpinS);
  while (now_s() < deadline_s) _mm_pause();
}

TimerSlack::TimerSlack() : previous_ns_(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) { prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0); }

TimerSlack::~TimerSlack() { prctl(PR_SET_TIMERSLACK, previous_ns_ > 0 ? previous_ns_ : 50000, 0, 0, 0); }

}  // namespace kernels
