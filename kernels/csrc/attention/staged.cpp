#include "staged.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kernels {

void staged_attention(const DecodeRequest& r, bool has_values, int64_t num_elements, ThreadPool* pool) {
  // Copied before they are checked: the tensor they come from may be written by another thread meanwhile.
  const std::vector<int32_t> lengths(r.context_lens, r.context_lens + r.num_seqs);
  const int64_t token_elements = int64_t(r.num_kv_heads) * r.head_dim * (has_values ? 2 : 1);
  int64_t num_tokens = 0;
  for (int seq = 0; seq < r.num_seqs; ++seq) {
    if (lengths[size_t(seq)] < 0)
      throw std::invalid_argument("context_lens[" + std::to_string(seq) + "]: expected 0 or more, got " +
                                  std::to_string(lengths[size_t(seq)]));
    num_tokens += lengths[size_t(seq)];
  }
  if (num_tokens * token_elements != num_elements)
    throw std::invalid_argument("staging: expected " + std::to_string(num_tokens * token_elements) +
                                " elements for these context_lens, got " + std::to_string(num_elements));
  static const int32_t kFirstBlock = 0;
  const char* keys = static_cast<const char*>(r.k_cache);
  for (int seq = 0; seq < r.num_seqs; ++seq) {
    const int32_t length = lengths[size_t(seq)];
    const int64_t piece_bytes = int64_t(r.num_kv_heads) * length * r.head_dim * size_bytes(r.kv_dtype);
    DecodeRequest one = r;  // a cache of a single block
    one.q = static_cast<const char*>(r.q) + seq * r.q_stride * size_bytes(r.q_dtype);
    one.out = static_cast<char*>(r.out) + seq * r.out_stride * size_bytes(r.out_dtype);
    one.k_cache = keys;
    one.v_cache = has_values ? keys + piece_bytes : keys;
    one.block_tables = &kFirstBlock;
    one.context_lens = &length;
    one.num_seqs = 1;
    one.num_blocks = one.max_blocks = 1;
    one.block_size = std::max(length, 1);
    one.table_stride = 1;
    one.k_block_stride = one.v_block_stride = int64_t(r.num_kv_heads) * one.block_size * r.head_dim;
    decode_attention(one, pool);
    keys += piece_bytes * (has_values ? 2 : 1);
  }
}

}  // namespace kernels
