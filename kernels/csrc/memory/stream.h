// Whole-region reads and copies at the speed of memory: the ceilings that the other kernels are measured against.
#pragma once

#include <cstdint>

namespace kernels {

class ThreadPool;

// Reads every byte and returns the exclusive or of all 8-byte words (the last one filled up with zeros), each
// thread's part as `num_streams` streams: 1, 4 or 16.
uint64_t stream_read(const void* src, int64_t num_bytes, int num_streams, ThreadPool* pool);

// memcpy with non-temporal stores: neither evicts the kernels' data from the caches nor reads dst first.
void stream_copy(void* dst, const void* src, int64_t num_bytes);

void parallel_stream_copy(void* dst, const void* src, int64_t num_bytes, ThreadPool* pool);

// Asks for huge pages behind the whole ones of a region; false where the kernel refuses. Scattered KV blocks then cost
// fewer page walks.
bool advise_huge_pages(void* address, int64_t num_bytes);

namespace avx512 {
uint64_t read_words(const char* src, int64_t num_bytes, int num_streams);
}
namespace avx2 {
uint64_t read_words(const char* src, int64_t num_bytes, int num_streams);
}
namespace portable {
uint64_t read_words(const char* src, int64_t num_bytes, int num_streams);
}

}  // namespace kernels
