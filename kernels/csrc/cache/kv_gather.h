// Gather of sequences out of the paged cache, one contiguous sequence after another.
#pragma once

#include <cstdint>
#include <vector>

namespace kernels {

// One part of a cache: keys, values, or latents. [num_blocks, num_heads, block_size, width], dim 0 strided.
struct GatherPiece {
  const void* cache;
  int64_t block_stride_bytes, row_bytes;
  int num_heads;
};

struct GatherRequest {
  std::vector<GatherPiece> pieces;
  const int32_t* block_tables;  // [num_seqs, max_blocks], dim 0 strided
  const int32_t* lengths;       // [num_seqs], in tokens
  void* out;                    // for each sequence one piece after another, each [num_heads, length, width]
  int64_t num_blocks, table_stride, out_bytes;
  int num_seqs, max_blocks, block_size;
};

// Throws std::invalid_argument, naming the argument and before anything is written, for a length or a used block id out
// of range, or where `out` has another size than what is gathered.
void kv_gather(const GatherRequest& request);

}  // namespace kernels
