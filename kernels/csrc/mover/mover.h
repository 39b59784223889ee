// A data mover: traffic, a link that carries it, staging in between, and the threads of all three.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "link.h"
#include "traffic.h"

namespace kernels {

struct MoverConfig {
  int64_t packet_bytes;
  int depth;
  double rate_bytes_s, catch_up_s;  // rate 0: unpaced; memory links only
  int num_threads;      // that copy on a memory link; 1 on a CUDA link, the one that launches
  int num_slots;        // a priority class; 0: no staging
  int num_staging_threads;
  std::vector<int> cores;  // none, or one for each copying thread, then each staging thread
  int device;              // -1: memory
  std::string runtime_path;
};

// Calls from any thread. In a forked child, where its threads do not exist, every call throws std::runtime_error.
class Mover {
 public:
  explicit Mover(const MoverConfig& config);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // The bookkeeping; throws in a forked child.
  Traffic& traffic() const;

  // Stops (see Traffic::stop) and joins the threads. False when one did not end within `timeout_s`: then all requests
  // have failed, but memory of those under way may still be read and written and must never be freed.
  bool close(double timeout_s);

  // Callers inside wait(); close() gives them a moment to leave, so that none is left when the interpreter ends.
  std::atomic<int> num_waiting{0};

 private:
  struct Parts;  // lives as long as any thread

  void start(std::vector<LinkThread> threads, const std::vector<int>& cores);

  const pid_t owner_;
  std::shared_ptr<Parts> parts_;
  std::mutex closing_;
  std::vector<std::thread> threads_;
  bool closed_ = false, all_joined_ = true;
};

}  // namespace kernels
