#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "waiting.h"

namespace kernels {

struct ThreadPool::Parts {
  explicit Parts(int spin_us) : spin_us(spin_us) {}
  ~Parts() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    start.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void work();
  bool enter(uint64_t& seen);
  void leave();
  void call();
  void open_region(const std::function<void()>& region_body);
  void close_region();

  // The region in one word, so that a thread enters it in one step or not at all: threads inside (32 bits), whether it
  // is open, and its number.
  static constexpr uint64_t kInside = 0xffffffffu, kOpen = uint64_t(1) << 32, kNumber = uint64_t(1) << 33;
  static uint64_t number(uint64_t region) { return region / kNumber; }
  bool can_enter(uint64_t seen) const {
    const uint64_t now = region.load();
    return (now & kOpen) && number(now) != seen;
  }
  bool is_left() const { return !(region.load() & kInside); }

  const int spin_us;
  std::mutex turn;  // held for the whole of a region
  std::atomic<uint64_t> region{0};
  std::atomic<int> num_sleeping{0};
  std::atomic<bool> caller_sleeps{false}, stopping{false};
  const std::function<void()>* body = nullptr;
  std::mutex mutex;  // of those who sleep, and of `error`
  std::condition_variable start, done;
  std::exception_ptr error;  // the region's first
  std::vector<std::thread> threads;
};

ThreadPool::ThreadPool(int num_threads, int spin_us)
    : num_workers_(num_threads - 1), owner_(getpid()), parts_(std::make_unique<Parts>(spin_us)) {
  // Where a thread cannot start, this throws, and the end of `parts_` joins those that did.
  for (int i = 0; i < num_workers_; ++i) parts_->threads.emplace_back([parts = parts_.get()] { parts->work(); });
}

ThreadPool::~ThreadPool() {
  if (owner_ != getpid()) parts_.release();
}

void ThreadPool::check_owner() const {
  if (owner_ != getpid())
    throw std::runtime_error("this ThreadPool belongs to the process that made it, " + std::to_string(owner_) +
                             "; its threads do not exist in a forked child");
}

void ThreadPool::run(const std::function<void()>& body) {
  check_owner();
  Parts& parts = *parts_;
  std::lock_guard<std::mutex> turn(parts.turn);
  parts.open_region(body);
  parts.call();
  parts.close_region();
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(parts.mutex);
    std::swap(error, parts.error);
  }
  if (error) std::rethrow_exception(error);
}

void ThreadPool::Parts::open_region(const std::function<void()>& region_body) {
  body = &region_body;  // nobody is inside
  region.store((number(region.load()) + 1) * kNumber | kOpen);
  // A thread that goes to sleep counts itself before it looks at the region for the last time: one of the two is seen.
  if (num_sleeping.load() == 0) return;
  { std::lock_guard<std::mutex> lock(mutex); }  // who has looked waits by now
  start.notify_all();
}

void ThreadPool::Parts::close_region() {
  region.fetch_and(~kOpen);
  const auto left = [&] { return is_left(); };
  if (spin(spin_us, left)) return;
  std::unique_lock<std::mutex> lock(mutex);
  caller_sleeps = true;
  done.wait(lock, left);
  caller_sleeps = false;
}

void ThreadPool::Parts::work() {
  uint64_t seen = 0;
  const auto wanted = [&] { return stopping.load() || can_enter(seen); };
  while (true) {
    if (!spin(spin_us, wanted)) {
      std::unique_lock<std::mutex> lock(mutex);
      ++num_sleeping;
      start.wait(lock, wanted);
      --num_sleeping;
    }
    if (stopping) return;
    if (!enter(seen)) continue;
    call();
    leave();
  }
}

bool ThreadPool::Parts::enter(uint64_t& seen) {
  uint64_t now = region.load();
  while ((now & kOpen) && number(now) != seen)
    if (region.compare_exchange_weak(now, now + 1)) return seen = number(now), true;
  return false;
}

void ThreadPool::Parts::leave() {
  if (((region.fetch_sub(1) - 1) & (kInside | kOpen)) || !caller_sleeps.load()) return;
  { std::lock_guard<std::mutex> lock(mutex); }
  done.notify_one();
}

// The others still use what `body` refers to: nothing may unwind before they have all returned.
void ThreadPool::Parts::call() {
  try {
    (*body)();
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

int default_spin_us(int num_threads) {
  constexpr int kSpinUs = 50, kMostUs = 10000;
  const char* asked = std::getenv("KERNELS_SPIN_US");
  if (asked && *asked) {
    char* end = nullptr;
    const long value = std::strtol(asked, &end, 10);
    if (*end || value < 0 || value > kMostUs)
      throw std::invalid_argument("KERNELS_SPIN_US: expected 0 to " + std::to_string(kMostUs) + ", got '" + asked + "'");
    return int(value);
  }
  cpu_set_t cores;
  const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
  return known && num_threads <= CPU_COUNT(&cores) ? kSpinUs : 0;
}

}  // namespace

ThreadPool* default_pool(int num_threads) {
  if (num_threads <= 1) return nullptr;
  DefaultPools& all = default_pools();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<ThreadPool>& pool = all.pools[num_threads];
  if (!pool) pool = std::make_unique<ThreadPool>(num_threads, default_spin_us(num_threads));
  return pool.get();
}

void for_each_item(ThreadPool* pool, int64_t num_items, const std::function<void(int64_t, int64_t)>& body) {
  if (pool) pool->check_owner();
  if (!pool || num_items <= 1) {
    for (int64_t i = 0; i < num_items; ++i) body(i, i + 1);
    return;
  }
  // Near the end nobody takes an item early that another thread could run at once.
  const int64_t last_reserved = num_items - pool->size();
  std::atomic<int64_t> counter{0};
  pool->run([&] {
    int64_t item = counter.fetch_add(1);
    while (item < num_items) {
      const int64_t next = counter.load() < last_reserved ? counter.fetch_add(1) : num_items;
      body(item, std::min(next, num_items));
      item = next < num_items ? next : counter.fetch_add(1);
    }
  });
}

}  // namespace kernels
