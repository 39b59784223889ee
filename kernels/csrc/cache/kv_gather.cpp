#include "kv_gather.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kernels {
namespace {

// Lengths and used blocks, copied before they are checked: the tensors they come from may be written by another thread
// meanwhile.
struct CheckedReads {
  std::vector<int32_t> lengths, blocks;  // the blocks of one sequence after those of another
};

CheckedReads checked_reads(const GatherRequest& r) {
  CheckedReads reads;
  reads.lengths.assign(r.lengths, r.lengths + r.num_seqs);
  const int64_t capacity = int64_t(r.max_blocks) * r.block_size;
  int64_t token_bytes = 0, num_tokens = 0;
  for (const GatherPiece& piece : r.pieces) token_bytes += piece.num_heads * piece.row_bytes;
  for (int seq = 0; seq < r.num_seqs; ++seq) {
    const int32_t length = reads.lengths[size_t(seq)];
    if (length < 0 || length > capacity)
      throw std::invalid_argument("lengths[" + std::to_string(seq) + "]: expected 0 to " + std::to_string(capacity) +
                                  " (block_tables' width), got " + std::to_string(length));
    num_tokens += length;
    const int32_t* const table = r.block_tables + seq * r.table_stride;
    const int64_t num_used = (int64_t(length) + r.block_size - 1) / r.block_size;
    for (int64_t i = 0; i < num_used; ++i) {
      const volatile int32_t* const entry = table + i;
      const int32_t block = *entry;  // read once
      if (block < 0 || block >= r.num_blocks)
        throw std::invalid_argument("block_tables[" + std::to_string(seq) + ", " + std::to_string(i) +
                                    "]: expected a block below " + std::to_string(r.num_blocks) + ", got " +
                                    std::to_string(block));
      reads.blocks.push_back(block);
    }
  }
  if (num_tokens * token_bytes != r.out_bytes)
    throw std::invalid_argument("out: expected " + std::to_string(num_tokens * token_bytes) + " bytes, got " +
                                std::to_string(r.out_bytes));
  return reads;
}

}  // namespace

void kv_gather(const GatherRequest& r) {
  const CheckedReads reads = checked_reads(r);
  char* target = static_cast<char*>(r.out);
  const int32_t* blocks = reads.blocks.data();
  for (const int32_t length : reads.lengths) {
    for (const GatherPiece& piece : r.pieces)
      for (int head = 0; head < piece.num_heads; ++head) {
        const char* const rows = static_cast<const char*>(piece.cache) + head * r.block_size * piece.row_bytes;
        for (int32_t token = 0; token < length; token += r.block_size) {
          const int64_t nbytes = std::min(r.block_size, length - token) * piece.row_bytes;
          std::memcpy(target, rows + blocks[token / r.block_size] * piece.block_stride_bytes, size_t(nbytes));
          target += nbytes;
        }
      }
    blocks += (length + r.block_size - 1) / r.block_size;
  }
}

}  // namespace kernels
