#include "staging.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace kernels {
namespace {

constexpr int64_t kPageBytes = 4096;

// Both throw where the result does not fit.
int64_t whole_pages(int64_t num_bytes) {
  int64_t padded_bytes;
  if (__builtin_add_overflow(num_bytes, kPageBytes - 1, &padded_bytes))
    throw std::invalid_argument("packet_bytes: too large for a staging slot, " + std::to_string(num_bytes));
  return padded_bytes / kPageBytes * kPageBytes;
}

int64_t all_slots_bytes(int64_t slot_bytes, int64_t num_slots) {
  int64_t num_bytes;
  if (__builtin_mul_overflow(slot_bytes, num_slots, &num_bytes))
    throw std::invalid_argument("staging.num_slots: " + std::to_string(num_slots) + " slots of " +
                                std::to_string(slot_bytes) + " bytes are too large");
  return num_bytes;
}

}  // namespace

Staging::Staging(Traffic& traffic, Link& link, int64_t slot_bytes, int64_t num_slots, int num_threads)
    : traffic_(traffic),
      link_(link),
      slot_stride_bytes_(whole_pages(slot_bytes)),
      num_threads_(num_threads),
      memory_(link.allocate_staging(all_slots_bytes(slot_stride_bytes_, num_slots))) {}

Staging::~Staging() { link_.free_staging(memory_); }

std::vector<LinkThread> Staging::threads() {
  std::vector<LinkThread> threads;
  for (int i = 0; i < num_threads_; ++i)
    threads.push_back({"mover-stage" + std::to_string(i), true, [this] { work(); }});
  return threads;
}

void Staging::work() {
  while (const PacketPtr packet = traffic_.take_to_stage()) {
    char* slot = memory_ + packet->slot * slot_stride_bytes_;
    for_each_piece(*packet, [&](char*, const char* src, int64_t num_bytes, size_t, int64_t done_bytes) {
      std::memcpy(slot + done_bytes, src, size_t(num_bytes));  // not past the cache: the link reads it at once
      return true;
    });
    packet->staged = slot;
    traffic_.staged(packet);
  }
}

}  // namespace kernels
