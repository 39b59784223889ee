// All bookkeeping of a mover under one lock: what waits, what is staged, what is under way, and what came of it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "counters.h"
#include "pacer.h"
#include "request.h"

namespace kernels {

using RequestPtr = std::shared_ptr<Request>;
using PacketPtr = std::shared_ptr<Packet>;

// Packets start in FIFO order within a class, urgent ones first. At most `depth` packets of a class are with the link.
// With `num_slots` > 0 every packet is staged first, in one of that many slots of its class.
class Traffic {
 public:
  Traffic(int64_t packet_bytes, int depth, Pacer pacer, int num_slots);

  // -- the caller's side --

  // Throws std::runtime_error with the reason when the mover has stopped.
  RequestPtr submit(std::vector<Region> regions, Priority priority, uintptr_t wait_event, uintptr_t record_event);
  // Takes out a request of which nothing has started. False: it has started, or was settled already.
  bool cancel(const RequestPtr& request);
  // Waits until the request is settled (or, `issued`, stands in a CUDA stream with its event), at most to `deadline_s`.
  bool wait(Request& request, bool issued, double deadline_s);
  // Nothing starts any more. What waits fails with `reason`; packets with the link end. The first reason stays.
  void stop(const std::string& reason);
  // Stops, and settles even requests whose packets the link still has: their memory must not be freed.
  void abandon(const std::string& reason);

  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }  // an `abandon` came
  std::array<ClassCounters, kNumPriorities> counters();

  template <class Read>
  auto locked(Read read) {
    std::lock_guard<std::mutex> lock(mutex_);
    return read();
  }

  // -- the threads' side; each of these waits for work and returns null when the mover stops --

  PacketPtr take_to_stage();
  PacketPtr take_to_carry();

  void staged(const PacketPtr& packet);
  // The link starts to carry the packet (a CUDA stream: its event came, and the packet before it is over).
  void began(const PacketPtr& packet, double start_s);
  // Nothing more of the request starts; it fails when its packets under way are over.
  void refused(const RequestPtr& request, const std::string& error);
  // The request's last packet and event have been given to a CUDA stream.
  void issued(const RequestPtr& request);
  // The packet, which began, is over; `error` fails its request and nothing else.
  void ended(const PacketPtr& packet, double finish_s, const std::string& error);

 private:
  bool can_carry(int priority) const;
  int next_to_carry() const;  // -1: none
  int next_to_stage() const;
  PacketPtr cut(int priority);
  void drop_failed(int priority);
  void over(const PacketPtr& packet);  // gives back its slot, and settles the request with its last packet
  void fail(const RequestPtr& request, const std::string& error);
  void settle_if_over(const RequestPtr& request);
  void settle(const RequestPtr& request, RequestState state);

  const int64_t packet_bytes_;
  const int depth_;
  const bool stages_;
  std::mutex mutex_;
  std::condition_variable carry_, stage_;  // there may be work
  std::atomic<bool> stopping_{false}, failed_{false};
  std::string reason_;  // of the stop
  Pacer pacer_;

  std::deque<RequestPtr> waiting_[kNumPriorities];  // packets left to cut
  std::deque<PacketPtr> staged_[kNumPriorities];    // in the order they were cut; carried once filled
  std::vector<int> free_slots_[kNumPriorities];
  int num_in_flight_[kNumPriorities] = {};
  int num_gated_[kNumPriorities] = {};  // of those, waiting for an event
  std::unordered_set<RequestPtr> open_;  // not settled
  int64_t num_taken_ = 0, num_finished_ = 0;
  std::array<ClassCounters, kNumPriorities> counters_;
};

}  // namespace kernels
