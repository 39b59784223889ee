// Threads that run one parallel region at a time.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kernels {

class ThreadPool {
 public:
  // With `cores`: one thread pinned to each, and the caller only waits. Without: `num_threads` - 1 unpinned threads,
  // and the caller is the last. Throws std::invalid_argument when a core does not exist.
  explicit ThreadPool(int num_threads, std::vector<int> cores = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls body(i) once for each i below size(), in parallel, and returns when all have. Callers from several threads
  // take turns. `body` must not throw.
  void run(const std::function<void(int)>& body);

  int size() const { return num_workers_ + (caller_works_ ? 1 : 0); }

 private:
  void work(int index);

  const bool caller_works_;
  const int num_workers_;
  std::mutex turn_;  // held for the whole of a region
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* body_ = nullptr;
  int64_t generation_ = 0;
  int num_running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// A pool without chosen cores, made on first use and kept for the life of the process; null for one thread.
ThreadPool* default_pool(int num_threads);

// Runs body(item, next) for every item below `num_items`, in the caller when `pool` is null. Threads take items as they
// get free; `next` is the item the same thread runs after this one (num_items or more: none), so that its data can be
// fetched early.
void for_each_item(ThreadPool* pool, int64_t num_items, const std::function<void(int64_t item, int64_t next)>& body);

void pin_this_thread(int core);

}  // namespace kernels
