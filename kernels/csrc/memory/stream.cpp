#include "stream.h"

#include <emmintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../core/isa.h"
#include "../pool/thread_pool.h"

namespace kernels {
namespace {

// Equal parts, one a thread, cut at cache lines.
int64_t part_start(int64_t num_bytes, int64_t part, int num_parts) {
  return part == num_parts ? num_bytes : num_bytes / num_parts * part / 64 * 64;
}

}  // namespace

uint64_t stream_read(const void* src, int64_t num_bytes, int num_streams, ThreadPool* pool) {
  const Isa isa = current_vector_isa();
  const auto read = isa == Isa::kAvx512 ? avx512::read_words
                    : isa == Isa::kAvx2 ? avx2::read_words
                                        : portable::read_words;
  const char* from = static_cast<const char*>(src);
  if (!pool) return read(from, num_bytes, num_streams);
  std::atomic<uint64_t> total{0};
  for_each_item(pool, pool->size(), [&](int64_t part, int64_t) {
    const int64_t start = part_start(num_bytes, part, pool->size());
    total ^= read(from + start, part_start(num_bytes, part + 1, pool->size()) - start, num_streams);
  });
  return total;
}

void stream_copy(void* dst, const void* src, int64_t num_bytes) {
  if (num_bytes == 0) return;  // an empty tensor has no address, and memcpy wants one
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const int64_t head = std::min<int64_t>(num_bytes, int64_t(-reinterpret_cast<uintptr_t>(to) & 63));
  std::memcpy(to, from, size_t(head));
  int64_t i = head;
  for (; i + 64 <= num_bytes; i += 64) {
    const __m128i* line = reinterpret_cast<const __m128i*>(from + i);
    __m128i* target = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + i, from + i, size_t(num_bytes - i));
  _mm_sfence();  // non-temporal stores are weakly ordered: make them visible before the copy is reported as done
}

void parallel_stream_copy(void* dst, const void* src, int64_t num_bytes, ThreadPool* pool) {
  if (!pool || num_bytes == 0) return stream_copy(dst, src, num_bytes);
  for_each_item(pool, pool->size(), [&](int64_t part, int64_t) {
    const int64_t start = part_start(num_bytes, part, pool->size());
    const int64_t end = part_start(num_bytes, part + 1, pool->size());
    stream_copy(static_cast<char*>(dst) + start, static_cast<const char*>(src) + start, end - start);
  });
}

bool advise_huge_pages(void* address, int64_t num_bytes) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t start = (reinterpret_cast<uintptr_t>(address) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(address) + uintptr_t(num_bytes)) / page * page;
  return end > start && madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE) == 0;
}

}  // namespace kernels
