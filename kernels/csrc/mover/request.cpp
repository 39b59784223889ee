#include "request.h"

#include <algorithm>
#include <stdexcept>

namespace kernels {

std::shared_ptr<Request> make_request(std::vector<Region> regions, Priority priority, int64_t packet_bytes) {
  auto request = std::make_shared<Request>();
  for (const Region& region : regions)
    if (region.num_bytes < 0 || __builtin_add_overflow(request->num_bytes, region.num_bytes, &request->num_bytes))
      throw std::invalid_argument("a request's bytes do not fit 64 bits");
  request->regions = std::move(regions);
  request->priority = priority;
  request->num_packets = std::max<int64_t>(1, request->num_bytes / packet_bytes + (request->num_bytes % packet_bytes != 0));
  return request;
}

std::shared_ptr<Packet> cut_packet(const std::shared_ptr<Request>& request, int64_t packet_bytes) {
  auto packet = std::make_shared<Packet>();
  packet->request = request;
  packet->index = request->num_cut++;
  packet->num_bytes = std::min(packet_bytes, request->num_bytes - packet->index * packet_bytes);
  packet->first_region = request->next_region;
  packet->first_offset_bytes = request->next_offset_bytes;
  packet->last = request->num_cut == request->num_packets;
  for (int64_t left = packet->num_bytes; left > 0;) {
    const int64_t rest = request->regions[request->next_region].num_bytes - request->next_offset_bytes;
    if (left < rest) {
      request->next_offset_bytes += left;
      break;
    }
    left -= rest;
    request->next_offset_bytes = 0;
    ++request->next_region;
  }
  return packet;
}

}  // namespace kernels
