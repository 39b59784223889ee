#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

namespace kernels {

ThreadPool::ThreadPool(int num_threads, std::vector<int> cores)
    : caller_works_(cores.empty()), num_workers_(cores.empty() ? num_threads - 1 : int(cores.size())) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int core : cores)
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &allowed))
      throw std::invalid_argument("cores: this process may not run on core " + std::to_string(core));
  for (int i = 0; i < num_workers_; ++i) {
    const int core = cores.empty() ? -1 : cores[i];
    threads_.emplace_back([this, i, core] {
      if (core >= 0) pin_this_thread(core);
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& body) {
  std::lock_guard<std::mutex> turn(turn_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    num_running_ = num_workers_;
    ++generation_;
  }
  start_.notify_all();
  if (caller_works_) body(num_workers_);
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return num_running_ == 0; });
  body_ = nullptr;
}

void ThreadPool::work(int index) {
  int64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    const std::function<void(int)>* body = body_;
    lock.unlock();
    (*body)(index);
    lock.lock();
    if (--num_running_ == 0) done_.notify_one();
  }
}

ThreadPool* default_pool(int num_threads) {
  if (num_threads <= 1) return nullptr;
  static std::mutex mutex;
  static std::map<int, ThreadPool*> pools;  // leaked: threads may still be waiting when the process ends
  static pid_t owner = getpid();
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {  // after a fork the parent's threads do not exist here
    pools.clear();
    owner = getpid();
  }
  ThreadPool*& pool = pools[num_threads];
  if (!pool) pool = new ThreadPool(num_threads);
  return pool;
}

void for_each_item(ThreadPool* pool, int64_t num_items, const std::function<void(int64_t, int64_t)>& body) {
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

void pin_this_thread(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace kernels
