#include "cuda_link.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>

#include "../link/clock.h"

namespace kernels {
namespace {

// cudaSetDevice is of the thread: the caller's must stay as it is. What `body` throws is thrown here.
template <class Body>
void on_own_thread(Body body) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

std::string address_range(const void* start, int64_t num_bytes) {
  char text[64];
  const void* end = static_cast<const char*>(start) + num_bytes;
  std::snprintf(text, sizeof text, "%p..%p", start, end);
  return text;
}

}  // namespace

CudaLink::CudaLink(Traffic& traffic, const std::string& runtime_path, int device, int depth)
    : traffic_(traffic), cuda_(load_cuda_runtime(runtime_path)), device_(device) {
  on_own_thread([&] {
    try {
      create_lanes(depth);
    } catch (...) {
      destroy_lanes();
      throw;
    }
  });
}

CudaLink::~CudaLink() {
  on_own_thread([&] { destroy_lanes(); });
}

void CudaLink::create_lanes(int depth) {
  cuda_.check(cuda_.set_device(device_), "cudaSetDevice");
  int least = 0, greatest = 0;  // a greater priority is a lower number
  cuda_.check(cuda_.get_stream_priority_range(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  for (int priority = 0; priority < kNumPriorities; ++priority) {
    Lane& lane = lanes_[priority];
    cuda_.check(cuda_.stream_create_with_priority(&lane.stream, kCudaStreamNonBlocking,
                                                  priority == kUrgent ? greatest : least),
                "cudaStreamCreateWithPriority");
    for (int i = 0; i < 2 * depth; ++i) {
      CudaEvent event = nullptr;
      cuda_.check(cuda_.event_create_with_flags(&event, kCudaEventBlockingSync | kCudaEventDisableTiming),
                  "cudaEventCreateWithFlags");
      (i < depth ? lane.gates : lane.dones).push_back(event);
    }
  }
}

// Errors are not looked at: at a program's end the runtime may be gone already, and the driver frees what is left.
void CudaLink::destroy_lanes() {
  cuda_.set_device(device_);
  for (Lane& lane : lanes_) {
    for (CudaEvent event : lane.gates) cuda_.event_destroy(event);
    for (CudaEvent event : lane.dones) cuda_.event_destroy(event);
    if (lane.stream) cuda_.stream_destroy(lane.stream);
  }
}

char* CudaLink::allocate_staging(int64_t num_bytes) {
  void* memory = nullptr;
  on_own_thread([&] {
    cuda_.check(cuda_.set_device(device_), "cudaSetDevice");
    cuda_.check(cuda_.host_alloc(&memory, size_t(num_bytes), kCudaHostAllocPortable), "cudaHostAlloc");
  });
  return static_cast<char*>(memory);
}

void CudaLink::free_staging(char* memory) {
  on_own_thread([&] { cuda_.free_host(memory); });
}

std::vector<LinkThread> CudaLink::threads() {
  return {{"mover-launch", true, [this] { launch_all(); }},
          {"mover-normal", false, [this] { complete_all(lanes_[kNormal]); }},
          {"mover-urgent", false, [this] { complete_all(lanes_[kUrgent]); }}};
}

void CudaLink::launch_all() {
  struct End {  // however this thread ends, the others must learn of it
    CudaLink& link;
    ~End() {
      std::lock_guard<std::mutex> lock(link.mutex_);
      for (Lane& lane : link.lanes_) {
        lane.over = true;
        lane.changed.notify_all();
      }
    }
  } end{*this};
  cuda_.check(cuda_.set_device(device_), "cudaSetDevice");
  while (const PacketPtr packet = traffic_.take_to_carry()) {
    Lane& lane = lanes_[packet->request->priority];
    Launched launched = launch(packet, lane);
    if (!launched.error.empty())
      traffic_.refused(packet->request, launched.error);
    else if (packet->last)
      traffic_.issued(packet->request);
    std::lock_guard<std::mutex> lock(mutex_);
    lane.launched.push_back(std::move(launched));
    lane.changed.notify_all();
  }
}

// Also after an error the event is recorded: pieces before the failed one are under way and use the request's memory.
CudaLink::Launched CudaLink::launch(const PacketPtr& packet, Lane& lane) {
  const size_t turn = size_t(lane.num_launched++) % lane.dones.size();
  bool gated = false;
  Launched launched{packet, now_s(), nullptr, nullptr, ""};
  launched.error = enqueue(*packet, lane, lane.gates[turn], gated);
  if (gated) launched.gate = lane.gates[turn];
  const CudaError error = cuda_.event_record(lane.dones[turn], lane.stream);
  if (!error)
    launched.done = lane.dones[turn];
  else if (launched.error.empty())
    launched.error = std::string("cudaEventRecord failed: ") + cuda_.get_error_string(error);
  return launched;
}

std::string CudaLink::enqueue(const Packet& packet, Lane& lane, CudaEvent gate, bool& gated) {
  const Request& request = *packet.request;
  std::string failed;
  const auto ok = [&](CudaError error, const std::string& what) {
    if (error) failed = what + " failed: " + cuda_.get_error_string(error);
    return error == 0;
  };
  if (packet.waits_for_event()) {
    const auto event = reinterpret_cast<CudaEvent>(request.wait_event);
    if (!ok(cuda_.stream_wait_event(lane.stream, event, 0), "cudaStreamWaitEvent for wait_event")) return failed;
    if (!ok(cuda_.event_record(gate, lane.stream), "cudaEventRecord behind wait_event")) return failed;
    gated = true;
  }
  for_each_piece(packet, [&](char* dst, const char* src, int64_t num_bytes, size_t region, int64_t done_bytes) {
    if (packet.staged) src = packet.staged + done_bytes;
    const CudaError error = cuda_.memcpy_async(dst, src, size_t(num_bytes), kCudaMemcpyDefault, lane.stream);
    if (!error) return true;
    return ok(error, "cudaMemcpyAsync of region " + std::to_string(region) + " (" + std::to_string(num_bytes) +
                         " bytes, " + address_range(src, num_bytes) + " to " + address_range(dst, num_bytes) + ")");
  });
  if (failed.empty() && packet.last && request.record_event)
    ok(cuda_.event_record(reinterpret_cast<CudaEvent>(request.record_event), lane.stream),
       "cudaEventRecord of record_event");
  return failed;
}

void CudaLink::complete_all(Lane& lane) {
  cuda_.check(cuda_.set_device(device_), "cudaSetDevice");
  double free_s = 0;
  Launched launched;
  while (next_launched(lane, launched)) complete(launched, lane.stream, free_s);
}

bool CudaLink::next_launched(Lane& lane, Launched& launched) {
  std::unique_lock<std::mutex> lock(mutex_);
  lane.changed.wait(lock, [&] { return lane.over || !lane.launched.empty(); });
  if (lane.launched.empty()) return false;
  launched = std::move(lane.launched.front());
  lane.launched.pop_front();
  return true;
}

// Packets of a stream run one after the other: one starts when it was launched, its event came, and the one before it
// was over, whichever is last.
void CudaLink::complete(const Launched& launched, CudaStream stream, double& free_s) {
  const PacketPtr& packet = launched.packet;
  double start_s = std::max(launched.launched_s, free_s);
  CudaError error = 0;
  if (launched.gate) {
    error = cuda_.event_synchronize(launched.gate);
    start_s = now_s();
  }
  traffic_.began(packet, start_s);
  // Without an event only the stream's end tells that the packet's memory is no longer in use.
  const CudaError done_error =
      launched.done ? cuda_.event_synchronize(launched.done) : cuda_.stream_synchronize(stream);
  if (!error) error = done_error;
  free_s = std::max(start_s, now_s());
  std::string text = launched.error;
  if (text.empty() && error)
    text = "packet " + std::to_string(packet->index) + " (from byte " +
           std::to_string(packet->first_offset_bytes) + " of region " + std::to_string(packet->first_region) +
           ") failed: " + cuda_.get_error_string(error);
  traffic_.ended(packet, free_s, text);
}

}  // namespace kernels
