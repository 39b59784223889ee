#include "traffic.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "../link/clock.h"

namespace kernels {

Traffic::Traffic(int64_t packet_bytes, int depth, Pacer pacer, int num_slots)
    : packet_bytes_(packet_bytes), depth_(depth), stages_(num_slots > 0), pacer_(pacer) {
  for (int priority = 0; priority < kNumPriorities; ++priority)
    for (int slot = num_slots; slot-- > 0;) free_slots_[priority].push_back(priority * num_slots + slot);
}

RequestPtr Traffic::submit(std::vector<Region> regions, Priority priority, uintptr_t wait_event,
                           uintptr_t record_event) {
  RequestPtr request = make_request(std::move(regions), priority, packet_bytes_);
  request->wait_event = wait_event;
  request->record_event = record_event;
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) throw std::runtime_error(reason_);
  request->submitted_s = now_s();
  request->num_finished_before = num_finished_;
  waiting_[priority].push_back(request);
  open_.insert(request);
  ++counters_[priority].num_requests;
  (stages_ ? stage_ : carry_).notify_one();
  return request;
}

bool Traffic::cancel(const RequestPtr& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (request->state != RequestState::kWaiting) return false;
  auto& queue = waiting_[request->priority];
  queue.erase(std::find(queue.begin(), queue.end(), request));
  settle(request, RequestState::kCancelled);
  return true;
}

bool Traffic::wait(Request& request, bool issued, double deadline_s) {
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, the clock of now_s()
  const auto deadline = Clock::time_point(std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(deadline_s, now_s() + 1e6))));
  std::unique_lock<std::mutex> lock(mutex_);
  return request.changed.wait_until(lock, deadline, [&] { return request.settled() || (issued && request.issued); });
}

void Traffic::stop(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return;
  reason_ = reason;
  stopping_ = true;
  for (int priority = 0; priority < kNumPriorities; ++priority) {
    while (!waiting_[priority].empty()) fail(RequestPtr(waiting_[priority].front()), reason);
    // Slots that are being filled come back through staged().
    auto& queue = staged_[priority];
    const auto unfilled = std::stable_partition(queue.begin(), queue.end(), [](auto& p) { return p->filled; });
    const std::vector<PacketPtr> dropped(queue.begin(), unfilled);
    queue.clear();
    for (const PacketPtr& packet : dropped) {
      fail(packet->request, reason);
      over(packet);
    }
  }
  carry_.notify_all();
  stage_.notify_all();
}

void Traffic::abandon(const std::string& reason) {
  failed_ = true;  // first: who sees a request settled by this must see that its memory is still in use
  stop(reason);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RequestPtr& request : std::vector<RequestPtr>(open_.begin(), open_.end())) {
    fail(request, reason);
    if (!request->settled()) settle(request, RequestState::kFailed);
  }
}

std::array<ClassCounters, kNumPriorities> Traffic::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

// -- the threads' side --

PacketPtr Traffic::take_to_stage() {
  std::unique_lock<std::mutex> lock(mutex_);
  int priority = -1;
  stage_.wait(lock, [&] { return stopping_ || (priority = next_to_stage()) >= 0; });
  if (stopping_) return nullptr;
  PacketPtr packet = cut(priority);
  packet->slot = free_slots_[priority].back();
  free_slots_[priority].pop_back();
  staged_[priority].push_back(packet);
  if (next_to_stage() >= 0) stage_.notify_one();
  return packet;
}

void Traffic::staged(const PacketPtr& packet) {
  std::lock_guard<std::mutex> lock(mutex_);
  packet->ready_s = now_s();
  packet->filled = true;
  if (stopping_) {
    fail(packet->request, reason_);
    over(packet);
    return;
  }
  drop_failed(packet->request->priority);
  carry_.notify_one();
}

PacketPtr Traffic::take_to_carry() {
  std::unique_lock<std::mutex> lock(mutex_);
  int priority = -1;
  carry_.wait(lock, [&] { return stopping_ || (priority = next_to_carry()) >= 0; });
  if (stopping_) return nullptr;
  PacketPtr packet;
  if (stages_) {
    packet = staged_[priority].front();
    staged_[priority].pop_front();
    drop_failed(priority);
  } else {
    packet = cut(priority);
    packet->ready_s = packet->request->submitted_s;
  }
  packet->number = num_taken_++;
  ++num_in_flight_[priority];
  num_gated_[priority] += packet->waits_for_event();
  if (pacer_.paced()) {
    packet->window_start_s = pacer_.reserve(packet->num_bytes, packet->ready_s, now_s());
    packet->window_end_s = pacer_.free_s();
  }
  if (next_to_carry() >= 0) carry_.notify_one();
  return packet;
}

void Traffic::began(const PacketPtr& packet, double start_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int priority = packet->request->priority;
  packet->start_s = start_s;
  counters_[priority].packet_began(start_s);
  if (packet->waits_for_event()) {
    --num_gated_[priority];
    carry_.notify_all();
  }
}

void Traffic::refused(const RequestPtr& request, const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  fail(request, error);
  drop_failed(request->priority);
}

void Traffic::issued(const RequestPtr& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  request->issued = true;
  request->changed.notify_all();
}

void Traffic::ended(const PacketPtr& packet, double finish_s, const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  Request& request = *packet->request;
  ClassCounters& counters = counters_[request.priority];
  --num_in_flight_[request.priority];
  ++num_finished_;
  counters.packet_ended(finish_s);
  if (error.empty()) {
    request.spans.push_back({packet->number, packet->num_bytes, packet->start_s, finish_s});
    ++counters.num_packets;
    counters.num_bytes += packet->num_bytes;
  } else {
    fail(packet->request, error);
  }
  over(packet);
  drop_failed(request.priority);
  carry_.notify_all();
}

// -- under the lock --

bool Traffic::can_carry(int priority) const {
  return stages_ ? !staged_[priority].empty() && staged_[priority].front()->filled : !waiting_[priority].empty();
}

int Traffic::next_to_carry() const {
  if (can_carry(kUrgent)) {
    if (num_in_flight_[kUrgent] < depth_) return kUrgent;
    // Normal packets must not slow urgent ones down. Where those wait for an event, normal packets must go on: the
    // event may be of work that needs them.
    if (num_gated_[kUrgent] == 0) return -1;
  }
  return can_carry(kNormal) && num_in_flight_[kNormal] < depth_ ? kNormal : -1;
}

int Traffic::next_to_stage() const {
  for (int priority : {kUrgent, kNormal})
    if (!waiting_[priority].empty() && !free_slots_[priority].empty()) return priority;
  return -1;
}

PacketPtr Traffic::cut(int priority) {
  const RequestPtr request = waiting_[priority].front();
  PacketPtr packet = cut_packet(request, packet_bytes_);
  request->state = RequestState::kStarted;
  ++request->num_under_way;
  if (packet->last) waiting_[priority].pop_front();
  return packet;
}

void Traffic::drop_failed(int priority) {
  auto& queue = staged_[priority];
  while (!queue.empty() && queue.front()->filled && !queue.front()->request->error.empty()) {
    const PacketPtr packet = queue.front();
    queue.pop_front();
    over(packet);
  }
}

void Traffic::over(const PacketPtr& packet) {
  if (packet->slot >= 0) {
    free_slots_[packet->request->priority].push_back(packet->slot);
    stage_.notify_all();
  }
  --packet->request->num_under_way;
  settle_if_over(packet->request);
}

void Traffic::fail(const RequestPtr& request, const std::string& error) {
  if (request->settled()) return;
  if (request->error.empty()) request->error = error;
  auto& queue = waiting_[request->priority];
  const auto place = std::find(queue.begin(), queue.end(), request);
  if (place != queue.end()) queue.erase(place);
  settle_if_over(request);
}

void Traffic::settle_if_over(const RequestPtr& request) {
  if (request->settled() || request->num_under_way > 0) return;
  if (!request->error.empty())
    settle(request, RequestState::kFailed);
  else if (request->num_cut == request->num_packets)
    settle(request, RequestState::kDone);
}

void Traffic::settle(const RequestPtr& request, RequestState state) {
  request->state = state;
  request->finished_s = now_s();
  if (state == RequestState::kDone) {  // when the link was done, not when this lock was free
    request->finished_s = 0;
    for (const PacketSpan& span : request->spans) request->finished_s = std::max(request->finished_s, span.finish_s);
  }
  ClassCounters& counters = counters_[request->priority];
  ++(state == RequestState::kDone ? counters.num_done : state == RequestState::kFailed ? counters.num_failed
                                                                                       : counters.num_cancelled);
  open_.erase(request);
  request->changed.notify_all();
}

}  // namespace kernels
