// Scatter of new keys and values into the paged cache.
#pragma once

#include <cstdint>

#include "../core/types.h"

namespace kernels {

class ThreadPool;

struct AppendRequest {
  const void *k, *v;        // [num_tokens, num_kv_heads, head_dim], dim 0 strided; v may be null
  void *k_cache, *v_cache;  // [num_blocks, num_kv_heads, block_size, head_dim], dim 0 strided
  const void* slots;        // [num_tokens], block * block_size + offset
  bool slots_are_64_bit;
  DType src_dtype, cache_dtype;
  int64_t num_tokens, num_blocks;
  int num_kv_heads, head_dim, block_size;
  int64_t k_stride, v_stride, k_block_stride, v_block_stride;  // in elements
};

// Throws std::invalid_argument for a slot out of range, before anything is written. Of equal slots the last token wins.
void kv_append(const AppendRequest& request, ThreadPool* pool);

}  // namespace kernels
