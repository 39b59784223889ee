// Waiting without sleeping.
#pragma once

#include <immintrin.h>

#include <chrono>
#include <thread>

namespace kernels {

// Watches `is_true` for at most `spin_us`; returns its last answer.
template <class Condition>
bool spin(int spin_us, const Condition& is_true) {
  constexpr int kChecks = 16;  // between two looks at the clock
  using Clock = std::chrono::steady_clock;
  if (is_true()) return true;
  if (spin_us == 0) return false;
  const Clock::time_point end = Clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < kChecks; ++i) {
      if (is_true()) return true;
      _mm_pause();
    }
  } while (Clock::now() < end);
  return is_true();
}

// Waits for what another thread does within microseconds, unless it has lost its core: the caller's is given away then.
template <class Condition>
void wait_briefly(const Condition& is_true) {
  constexpr int kSpinUs = 20;
  while (!spin(kSpinUs, is_true)) std::this_thread::yield();
}

}  // namespace kernels
