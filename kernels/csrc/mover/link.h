// What carries packets to their destination.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kernels {

struct LinkThread {
  std::string name;  // at most 15 characters
  bool copies;       // works with the processor: gets one of the caller's cores
  std::function<void()> body;
};

// The bodies run until the traffic stops; what one throws is the end of the mover.
class Link {
 public:
  virtual ~Link() = default;
  virtual std::vector<LinkThread> threads() = 0;
  // Memory of the staging slots. Throws std::runtime_error.
  virtual char* allocate_staging(int64_t num_bytes) = 0;
  virtual void free_staging(char* memory) = 0;
};

}  // namespace kernels
