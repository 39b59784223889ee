#include "mover.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "../link/clock.h"
#include "../pool/thread_pool.h"
#include "cuda_link.h"
#include "memory_link.h"
#include "staging.h"

namespace kernels {
namespace {

constexpr char kClosed[] = "the mover was closed";

std::unique_ptr<Link> make_link(Traffic& traffic, const MoverConfig& config) {
  if (config.device < 0) return std::make_unique<MemoryLink>(traffic, config.num_threads);
  return std::make_unique<CudaLink>(traffic, config.runtime_path, config.device, config.depth);
}

}  // namespace

struct Mover::Parts {
  explicit Parts(const MoverConfig& config)
      : traffic(config.packet_bytes, config.depth, Pacer(config.rate_bytes_s, config.catch_up_s), config.num_slots),
        link(make_link(traffic, config)) {
    if (config.num_slots > 0)
      staging = std::make_unique<Staging>(traffic, *link, config.packet_bytes, int64_t(config.num_slots) * kNumPriorities,
                                          config.num_staging_threads);
  }

  Traffic traffic;
  std::unique_ptr<Link> link;
  std::unique_ptr<Staging> staging;  // below the link, which must outlive it to free its memory
  std::mutex mutex;
  std::condition_variable thread_ended;
  int num_running = 0;
};

Mover::Mover(const MoverConfig& config) : owner_(getpid()), parts_(std::make_shared<Parts>(config)) {
  std::vector<LinkThread> threads = parts_->link->threads();
  if (parts_->staging)
    for (LinkThread& thread : parts_->staging->threads()) threads.push_back(std::move(thread));
  try {
    start(std::move(threads), config.cores);
  } catch (...) {  // no more threads to be had: end those that run
    close(10.0);
    throw;
  }
}

Mover::~Mover() {
  if (owner_ == getpid()) {
    close(10.0);
    return;
  }
  // A forked child has neither these threads nor locks in a known state: leave everything as it is.
  new std::shared_ptr<Parts>(std::move(parts_));
  new std::vector<std::thread>(std::move(threads_));
}

Traffic& Mover::traffic() const {
  if (owner_ != getpid())
    throw std::runtime_error("this mover belongs to process " + std::to_string(owner_) +
                             "; its threads do not exist in a forked child");
  return parts_->traffic;
}

void Mover::start(std::vector<LinkThread> threads, const std::vector<int>& cores) {
  size_t next_core = 0;
  const auto count = [](Parts& parts, int change) {
    std::lock_guard<std::mutex> lock(parts.mutex);
    parts.num_running += change;
    parts.thread_ended.notify_all();
  };
  for (LinkThread& thread : threads) {
    const int core = thread.copies && next_core < cores.size() ? cores[next_core++] : -1;
    const auto body = [parts = parts_, thread = std::move(thread), core, count] {
      pthread_setname_np(pthread_self(), thread.name.c_str());
      if (core >= 0) pin_this_thread(core);
      try {
        thread.body();
      } catch (const std::exception& error) {
        parts->traffic.abandon("the mover failed in its thread " + thread.name + ": " + error.what());
      }
      count(*parts, -1);
    };
    threads_.emplace_back(body);
    count(*parts_, 1);
  }
}

bool Mover::close(double timeout_s) {
  if (owner_ != getpid()) return true;  // nothing of it runs here
  std::lock_guard<std::mutex> turn(closing_);
  if (closed_) return all_joined_;
  closed_ = true;
  parts_->traffic.stop(kClosed);
  const auto timeout = std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e6));
  {
    std::unique_lock<std::mutex> lock(parts_->mutex);
    all_joined_ = parts_->thread_ended.wait_for(lock, timeout, [&] { return parts_->num_running == 0; });
  }
  if (!all_joined_) parts_->traffic.abandon(std::string(kClosed) + ", and its link did not end in time");
  for (std::thread& thread : threads_) all_joined_ ? thread.join() : thread.detach();
  threads_.clear();
  if (all_joined_) {  // pinned memory and streams go now, not when the last ticket is garbage
    parts_->staging.reset();
    parts_->link.reset();
  }
  const double patience_s = now_s() + 1.0;
  while (num_waiting > 0 && now_s() < patience_s) sleep_until(now_s() + 1e-3);
  return all_joined_;
}

}  // namespace kernels
