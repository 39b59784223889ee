// Copies with cudaMemcpyAsync on two streams, one a priority class.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "cuda_runtime.h"
#include "link.h"
#include "traffic.h"

namespace kernels {

// One thread gives packets to the streams, and one a stream blocks on the event behind each packet. So a stream has
// its next packet before the last one ends, and no CUDA callback is needed.
class CudaLink : public Link {
 public:
  // Throws std::runtime_error when the device or its streams cannot be had. The caller's current device stays.
  CudaLink(Traffic& traffic, const std::string& runtime_path, int device, int depth);
  ~CudaLink() override;

  std::vector<LinkThread> threads() override;
  char* allocate_staging(int64_t num_bytes) override;
  void free_staging(char* memory) override;

 private:
  struct Launched {
    PacketPtr packet;
    double launched_s;
    CudaEvent gate, done;  // null: not recorded
    std::string error;
  };
  struct Lane {
    CudaStream stream = nullptr;
    std::vector<CudaEvent> gates, dones;  // `depth` of each, used in turn
    int64_t num_launched = 0;
    std::deque<Launched> launched;  // this and `over` are guarded by mutex_
    std::condition_variable changed;
    bool over = false;
  };

  void create_lanes(int depth);
  void destroy_lanes();
  void launch_all();
  Launched launch(const PacketPtr& packet, Lane& lane);
  std::string enqueue(const Packet& packet, Lane& lane, CudaEvent gate, bool& gated);
  void complete_all(Lane& lane);
  void complete(const Launched& launched, CudaStream stream, double& free_s);
  bool next_launched(Lane& lane, Launched& launched);

  Traffic& traffic_;
  const CudaRuntime cuda_;
  const int device_;
  std::mutex mutex_;
  Lane lanes_[kNumPriorities];
};

}  // namespace kernels
