// Exclusive or of all words of a region, read as 1, 4 or 16 parallel streams: on some machines many DRAM pages open at
// once are 20-30 % faster, on others the hardware prefetchers follow one stream best. A line holds 8 words of a vector.
#pragma once

namespace kernels::KERNELS_ISA_NS {

typedef uint64_t Line __attribute__((vector_size(64)));

inline void add_line(Line& sum, const char* p) {
  Line line;
  std::memcpy(&line, p, sizeof line);
  sum ^= line;
}

template <int kStreams>
uint64_t read_streams(const char* src, int64_t num_bytes) {
  constexpr int64_t kStep = 256;
  const int64_t stream_bytes = num_bytes / kStreams / kStep * kStep;
  Line sums[4] = {};
  for (int64_t i = 0; i < stream_bytes; i += kStep)
    for (int stream = 0; stream < kStreams; ++stream)
      for (int line = 0; line < 4; ++line) add_line(sums[line], src + stream * stream_bytes + i + line * 64);
  int64_t i = kStreams * stream_bytes;
  for (; i + 64 <= num_bytes; i += 64) add_line(sums[0], src + i);
  char rest[64] = {};
  std::memcpy(rest, src + i, size_t(num_bytes - i));
  add_line(sums[0], rest);
  const Line total = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  uint64_t word = 0;
  for (int w = 0; w < 8; ++w) word ^= total[w];
  return word;
}

uint64_t read_words(const char* src, int64_t num_bytes, int num_streams) {
  if (num_streams == 1) return read_streams<1>(src, num_bytes);
  return num_streams == 4 ? read_streams<4>(src, num_bytes) : read_streams<16>(src, num_bytes);
}

}  // namespace kernels::KERNELS_ISA_NS
