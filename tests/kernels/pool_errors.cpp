// A body that throws in some of a pool's threads, or in all: the caller gets one of the errors, when no share runs any
// more, and the pool works on. Says what went wrong, and returns non-zero.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "pool/thread_pool.h"

using namespace kernels;

namespace {

bool fails_well(ThreadPool& pool, int first, int last) {
  std::atomic<int> num_inside{0}, num_over{0};
  std::string error;
  try {
    pool.run([&] {
      const int i = num_inside++;
      while (num_inside < pool.size()) std::this_thread::yield();
      if (i >= first && i <= last) {
        ++num_over;
        throw std::runtime_error("share " + std::to_string(i));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the one that throws is over long before
      ++num_over;
    });
  } catch (const std::runtime_error& caught) {
    error = caught.what();
  }
  const int num_seen = num_over;
  std::atomic<int> num_after{0};
  for_each_item(&pool, 1000, [&](int64_t, int64_t) { ++num_after; });
  bool known = false;
  for (int i = first; i <= last; ++i) known |= error == "share " + std::to_string(i);
  if (known && num_seen == pool.size() && num_after == 1000) return true;
  std::fprintf(stderr, "%d..%d of %d throw: \"%s\", %d over, then %d\n", first, last, pool.size(), error.c_str(), num_seen,
               num_after.load());
  return false;
}

}  // namespace

int main() {
  bool good = true;
  for (const auto& [size, spin_us] : {std::pair{1, 0}, {2, 0}, {2, 50}, {4, 0}, {4, 1000}}) {
    ThreadPool pool(size, spin_us);
    for (int i = 0; i < size; ++i) good &= fails_well(pool, i, i);
    good &= fails_well(pool, 0, size - 1);
  }
  return good ? 0 : 1;
}
