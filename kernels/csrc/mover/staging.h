// Pageable memory to the device in two steps that overlap: into a pinned slot here, on from there by the link.
#pragma once

#include "link.h"
#include "traffic.h"

namespace kernels {

class Staging {
 public:
  Staging(Traffic& traffic, Link& link, int64_t slot_bytes, int64_t num_slots, int num_threads);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::vector<LinkThread> threads();

 private:
  void work();

  Traffic& traffic_;
  Link& link_;
  const int64_t slot_stride_bytes_;
  const int num_threads_;
  char* const memory_;
};

}  // namespace kernels
