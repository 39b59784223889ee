// Copies between places in host memory, at an emulated link's rate or as fast as memory allows.
#pragma once

#include "link.h"
#include "traffic.h"

namespace kernels {

class MemoryLink : public Link {
 public:
  MemoryLink(Traffic& traffic, int num_threads) : traffic_(traffic), num_threads_(num_threads) {}

  std::vector<LinkThread> threads() override;
  char* allocate_staging(int64_t num_bytes) override;
  void free_staging(char* memory) override;

 private:
  void work();
  bool copy(const Packet& packet);  // false: the mover stopped meanwhile

  Traffic& traffic_;
  const int num_threads_;
};

}  // namespace kernels
