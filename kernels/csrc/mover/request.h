// A request to copy regions, and the packets it is cut into. All fields that change are guarded by Traffic's lock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kernels {

// The two FIFO classes; the numbers index arrays.
enum Priority : int { kNormal = 0, kUrgent = 1 };
constexpr int kNumPriorities = 2;

struct Region {
  char* dst;
  const char* src;
  int64_t num_bytes;
};

// A packet as carried by the link. `number` counts the mover's packets in the order of their start, from 0.
struct PacketSpan {
  int64_t number, num_bytes;
  double start_s, finish_s;
};

enum class RequestState { kWaiting, kStarted, kDone, kFailed, kCancelled };

struct Request {
  std::vector<Region> regions;
  Priority priority = kNormal;
  uintptr_t wait_event = 0, record_event = 0;  // cudaEvent_t, 0: none

  int64_t num_bytes = 0, num_packets = 0;
  double submitted_s = 0;
  int64_t num_finished_before = 0;  // packets of the mover that had finished when this was submitted

  // Where the next packet is cut.
  int64_t num_cut = 0;
  size_t next_region = 0;
  int64_t next_offset_bytes = 0;

  int64_t num_under_way = 0;  // packets cut and not yet over
  RequestState state = RequestState::kWaiting;
  bool issued = false;  // the last packet and `record_event` stand in a CUDA stream
  std::string error;    // the first one; not empty: nothing more of this request starts
  std::vector<PacketSpan> spans;
  double finished_s = 0;
  std::condition_variable changed;  // issued or settled

  bool settled() const { return state != RequestState::kWaiting && state != RequestState::kStarted; }
};

// A stretch of a request's concatenated regions. Of a request without bytes there is one empty packet, so that it
// keeps its place in the order and its events.
struct Packet {
  std::shared_ptr<Request> request;
  int64_t index = 0, num_bytes = 0;
  size_t first_region = 0;
  int64_t first_offset_bytes = 0;
  bool last = false;

  char* staged = nullptr;  // the slot's pinned copy of all bytes, once `filled`
  int slot = -1;
  bool filled = false;
  double ready_s = 0;  // could have started from here on

  int64_t number = 0;  // in the order in which the link took packets
  double window_start_s = 0, window_end_s = 0;  // when a paced link carries it; both 0: unpaced
  double start_s = 0;

  bool waits_for_event() const { return index == 0 && request->wait_event != 0; }
};

std::shared_ptr<Request> make_request(std::vector<Region> regions, Priority priority, int64_t packet_bytes);

// The next packet of a request that has one left.
std::shared_ptr<Packet> cut_packet(const std::shared_ptr<Request>& request, int64_t packet_bytes);

// Calls piece(dst, src, num_bytes, region, done_bytes) for every stretch of one region in the packet; `done_bytes` of
// the packet lie before it. `piece` returns false to stop.
template <class Piece>
void for_each_piece(const Packet& packet, Piece piece) {
  size_t index = packet.first_region;
  int64_t offset = packet.first_offset_bytes;
  for (int64_t done = 0; done < packet.num_bytes; ++index, offset = 0) {
    const Region& region = packet.request->regions[index];
    const int64_t left = packet.num_bytes - done, rest = region.num_bytes - offset;
    const int64_t num_bytes = rest < left ? rest : left;
    if (num_bytes == 0) continue;
    if (!piece(region.dst + offset, region.src + offset, num_bytes, index, done)) return;
    done += num_bytes;
  }
}

}  // namespace kernels
