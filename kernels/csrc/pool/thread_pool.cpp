#include "thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kernels {

struct ThreadPool::Parts {
  ~Parts() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    start.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void work(int index);
  void call(int index);

  std::mutex turn;  // held for the whole of a region
  std::mutex mutex;
  std::condition_variable start, done;
  const std::function<void(int)>* body = nullptr;
  std::exception_ptr error;  // the region's first
  int64_t generation = 0;
  int num_running = 0;
  bool stopping = false;
  std::vector<std::thread> threads;
};

ThreadPool::ThreadPool(int num_threads)
    : num_workers_(num_threads - 1), owner_(getpid()), parts_(std::make_unique<Parts>()) {
  // Where a thread cannot start, this throws, and the end of `parts_` joins those that did.
  for (int i = 0; i < num_workers_; ++i)
    parts_->threads.emplace_back([parts = parts_.get(), i] { parts->work(i); });
}

ThreadPool::~ThreadPool() {
  if (owner_ != getpid()) parts_.release();
}

void ThreadPool::check_owner() const {
  if (owner_ != getpid())
    throw std::runtime_error("this ThreadPool belongs to the process that made it, " + std::to_string(owner_) +
                             "; its threads do not exist in a forked child");
}

void ThreadPool::run(const std::function<void(int)>& body) {
  check_owner();
  Parts& parts = *parts_;
  std::lock_guard<std::mutex> turn(parts.turn);
  {
    std::lock_guard<std::mutex> lock(parts.mutex);
    parts.body = &body;
    parts.num_running = num_workers_;
    ++parts.generation;
  }
  parts.start.notify_all();
  parts.call(num_workers_);
  std::exception_ptr error;
  {
    std::unique_lock<std::mutex> lock(parts.mutex);
    parts.done.wait(lock, [&] { return parts.num_running == 0; });
    parts.body = nullptr;
    std::swap(error, parts.error);
  }
  if (error) std::rethrow_exception(error);
}

void ThreadPool::Parts::work(int index) {
  int64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    start.wait(lock, [&] { return stopping || generation != seen; });
    if (stopping) return;
    seen = generation;
    lock.unlock();
    call(index);
    lock.lock();
    if (--num_running == 0) done.notify_one();
  }
}

// The others still use what `body` refers to: nothing may unwind before they have all returned.
void ThreadPool::Parts::call(int index) {
  try {
    (*body)(index);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!error) error = std::current_exception();
  }
}

namespace {

struct DefaultPools {  // leaked: threads may still be waiting when the process ends
  const pid_t owner = getpid();
  std::mutex mutex;
  std::map<int, std::unique_ptr<ThreadPool>> pools;
};

// A forked child has neither the parent's threads nor, perhaps, its mutex unlocked: it starts with pools of its own.
DefaultPools& default_pools() {
  static std::atomic<DefaultPools*> current{nullptr};
  DefaultPools* found = current.load();
  while (!found || found->owner != getpid()) {
    auto fresh = std::make_unique<DefaultPools>();
    if (current.compare_exchange_strong(found, fresh.get())) found = fresh.release();
  }
  return *found;
}

}  // namespace

ThreadPool* default_pool(int num_threads) {
  if (num_threads <= 1) return nullptr;
  DefaultPools& all = default_pools();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<ThreadPool>& pool = all.pools[num_threads];
  if (!pool) pool = std::make_unique<ThreadPool>(num_threads);
  return pool.get();
}

void for_each_item(ThreadPool* pool, int64_t num_items, const std::function<void(int64_t, int64_t)>& body) {
  if (pool) pool->check_owner();
  if (!pool || num_items <= 1) {
    for (int64_t i = 0; i < num_items; ++i) body(i, i + 1);
    return;
  }
  std::atomic<int64_t> counter{0};
  pool->run([&](int) {
    int64_t item = counter.fetch_add(1);
    while (item < num_items) {
      const int64_t next = counter.fetch_add(1);
      body(item, next);
      item = next;
    }
  });
}

}  // namespace kernels
