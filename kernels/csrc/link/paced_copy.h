// A copy that keeps to a link's speed.
#pragma once

#include <cstdint>
#include <functional>

namespace kernels {

constexpr int64_t kPacingChunkBytes = 256 * 1024;

// Starts at max(now, `start_s`), a hand-over of up to 150 us not counted, and copies in chunks, each ending no earlier
// than its share of `rate_bytes_s` allows (0: no pacing). Returns when the link is free again: start + num_bytes / rate
// or, if memory was slower, later. `interrupt` is called some times a second during long waits; what it throws ends the
// copy between two chunks.
double paced_copy(void* dst, const void* src, int64_t num_bytes, double rate_bytes_s, double start_s,
                  const std::function<void()>& interrupt);

}  // namespace kernels
