#include "bulk_copy.h"

#include <immintrin.h>

#include "../core/isa.h"
#include "../memory/stream.h"

namespace kernels {
namespace {

constexpr int64_t kPageBytes = 4096, kLineBytes = 64;
constexpr int kPages = 4;
constexpr int64_t kBlockBytes = kPages * kPageBytes;

// Both copy one block of kPages pages, a few lines of each page in turn. `dst` is aligned to a line; lines to come are
// fetched ahead, since a hardware prefetcher does not follow a page for only a few lines at a time.
__attribute__((target("avx512f"))) void copy_block_avx512(char* dst, const char* src) {
  constexpr int kLines = 4;
  for (int64_t i = 0; i < kPageBytes; i += kLines * kLineBytes) {
    for (int page = 0; page < kPages; ++page) {
      const char* from = src + page * kPageBytes + i;
      char* to = dst + page * kPageBytes + i;
      __m512i lines[kLines];
      for (int l = 0; l < kLines; ++l) _mm_prefetch(from + (kLines + l) * kLineBytes, _MM_HINT_T0);
      for (int l = 0; l < kLines; ++l) lines[l] = _mm512_loadu_si512(from + l * kLineBytes);
      for (int l = 0; l < kLines; ++l)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + l * kLineBytes), lines[l]);
    }
  }
}

void copy_block_portable(char* dst, const char* src) {
  constexpr int kLines = 2, kParts = kLines * int(kLineBytes / sizeof(__m128i));
  for (int64_t i = 0; i < kPageBytes; i += kLines * kLineBytes) {
    for (int page = 0; page < kPages; ++page) {
      const char* from = src + page * kPageBytes + i;
      const auto* in = reinterpret_cast<const __m128i*>(from);
      auto* out = reinterpret_cast<__m128i*>(dst + page * kPageBytes + i);
      __m128i parts[kParts];
      for (int l = 0; l < kLines; ++l) _mm_prefetch(from + 512 + l * kLineBytes, _MM_HINT_T0);
      for (int p = 0; p < kParts; ++p) parts[p] = _mm_loadu_si128(in + p);
      for (int p = 0; p < kParts; ++p) _mm_stream_si128(out + p, parts[p]);
    }
  }
}

}  // namespace

void bulk_copy(void* dst, const void* src, int64_t num_bytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (kLineBytes - 1);
  if (num_bytes >= head + kBlockBytes) {
    stream_copy(to, from, head);
    const auto copy_block = current_vector_isa() == Isa::kAvx512 ? copy_block_avx512 : copy_block_portable;
    int64_t done = head;
    for (; done + kBlockBytes <= num_bytes; done += kBlockBytes) copy_block(to + done, from + done);
    to += done, from += done, num_bytes -= done;
  }
  stream_copy(to, from, num_bytes);  // ends with a fence: stores of the blocks are visible too
}

}  // namespace kernels
