#include "memory_link.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "../link/clock.h"
#include "../link/paced_copy.h"
#include "../memory/stream.h"
#include "bulk_copy.h"

namespace kernels {
namespace {

constexpr double kStopCheckS = 10e-3;  // a slow link's thread notices within this time that the mover stops
constexpr size_t kHugePageBytes = size_t(2) << 20;

bool sleep_unless_stopped(const Traffic& traffic, double until_s) {
  while (!traffic.stopping()) {
    const double now = now_s();
    if (now >= until_s) return true;
    sleep_until(std::min(until_s, now + kStopCheckS));
  }
  return false;
}

}  // namespace

std::vector<LinkThread> MemoryLink::threads() {
  std::vector<LinkThread> threads;
  for (int i = 0; i < num_threads_; ++i)
    threads.push_back({"mover-copy" + std::to_string(i), true, [this] { work(); }});
  return threads;
}

char* MemoryLink::allocate_staging(int64_t num_bytes) {
  const size_t whole_pages = (size_t(num_bytes) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* memory = std::aligned_alloc(kHugePageBytes, whole_pages);
  if (!memory) throw std::runtime_error("staging: out of memory for " + std::to_string(num_bytes) + " bytes");
  advise_huge_pages(memory, int64_t(whole_pages));
  return static_cast<char*>(memory);
}

void MemoryLink::free_staging(char* memory) { std::free(memory); }

void MemoryLink::work() {
  TimerSlack slack;
  while (const PacketPtr packet = traffic_.take_to_carry()) {
    const bool in_time = sleep_unless_stopped(traffic_, packet->window_start_s);
    traffic_.began(packet, now_s());
    const bool copied = in_time && copy(*packet);
    traffic_.ended(packet, now_s(), copied ? "" : "the mover was stopped while it copied");
  }
}

bool MemoryLink::copy(const Packet& packet) {
  const double length_s = packet.window_end_s - packet.window_start_s;  // 0: unpaced
  bool running = true;
  for_each_piece(packet, [&](char* dst, const char* src, int64_t num_bytes, size_t, int64_t done_bytes) {
    if (packet.staged) src = packet.staged + done_bytes;
    const int64_t chunk_bytes = length_s > 0 ? kPacingChunkBytes : num_bytes;
    for (int64_t i = 0; i < num_bytes && running; i += chunk_bytes) {
      const int64_t chunk = std::min(chunk_bytes, num_bytes - i);
      bulk_copy(dst + i, src + i, chunk);
      const double share = double(done_bytes + i + chunk) / double(packet.num_bytes);
      if (length_s > 0 && share < 1)
        running = sleep_unless_stopped(traffic_, packet.window_start_s + share * length_s);
    }
    return running;
  });
  if (!running || length_s == 0) return running;
  // Only after a request's last packet does a late wake-up show; the next packet makes up for those before.
  running = sleep_unless_stopped(traffic_, packet.window_end_s - (packet.last ? kSpinS : 0));
  if (running && packet.last) sleep_exactly_until(packet.window_end_s);
  return running;
}

}  // namespace kernels
