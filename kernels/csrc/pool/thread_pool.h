// Threads that run one parallel region at a time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace kernels {

class ThreadPool {
 public:
  // Starts `num_threads` - 1 threads; the caller of `run` is the last. A thread without work watches for the next
  // region for `spin_us` before it sleeps, and so does a caller that waits for the last threads. Throws
  // std::system_error when a thread cannot start (none is left then).
  ThreadPool(int num_threads, int spin_us);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls `body` in the caller and, at the same time, in each thread that comes before the caller's own call is over;
  // returns when all calls have. A thread that sleeps may come too late: `body` takes work until there is none. Callers
  // from several threads take turns. What a body throws is thrown here after all have returned, the first of several.
  // Throws std::runtime_error in a forked child, where the threads do not exist.
  void run(const std::function<void()>& body);

  // Throws std::runtime_error in a forked child, as `run` does.
  void check_owner() const;

  int size() const { return num_workers_ + 1; }

 private:
  struct Parts;  // threads and locks: a forked child must not touch them, not even to destroy them

  const int num_workers_;
  const pid_t owner_;
  std::unique_ptr<Parts> parts_;
};

// A pool made on first use and kept for the life of the process; null for one thread. Its threads spin for the
// environment's KERNELS_SPIN_US (0 to 10000), without which it is 50 us where each thread can have a core of its own and
// 0 elsewhere. Throws std::invalid_argument, naming the variable, for another value.
ThreadPool* default_pool(int num_threads);

// Runs body(item, next) for every item below `num_items`, in the caller when `pool` is null. Threads take items in
// ascending order as they get free; `next` is the item the same thread runs after this one (num_items: none, or not
// known yet), so that its data can be fetched early.
void for_each_item(ThreadPool* pool, int64_t num_items, const std::function<void(int64_t item, int64_t next)>& body);

}  // namespace kernels
