// A body that throws in some of a pool's shares, or in all: the caller gets one of the errors, when no share runs any
// more, and the pool works on. Says what went wrong, and returns non-zero.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "pool/thread_pool.h"

using namespace kernels;

namespace {

bool fails_well(ThreadPool& pool, int first, int last) {
  std::atomic<int> num_over{0};
  std::string error;
  try {
    pool.run([&](int i) {
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
  int num_after = 0;
  std::atomic<int> count{0};
  pool.run([&](int) { ++count; });
  num_after = count;
  bool known = false;
  for (int i = first; i <= last; ++i) known |= error == "share " + std::to_string(i);
  if (known && num_seen == pool.size() && num_after == pool.size()) return true;
  std::fprintf(stderr, "%d..%d of %d throw: \"%s\", %d over, then %d\n", first, last, pool.size(), error.c_str(), num_seen,
               num_after);
  return false;
}

}  // namespace

int main() {
  bool good = true;
  for (int size : {1, 2, 4}) {
    ThreadPool pool(size);
    for (int i = 0; i < size; ++i) good &= fails_well(pool, i, i);
    good &= fails_well(pool, 0, size - 1);
  }
  return good ? 0 : 1;
}
