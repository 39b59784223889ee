// Decode attention over a paged KV cache: the request, its pieces of work, and the per-ISA kernels.
//
// Latent attention (MLA) is the same with one KV head, whose values are the first `value_dim` elements of its keys.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/types.h"

namespace kernels {

class ThreadPool;

struct DecodeRequest {
  const void* q;        // [num_seqs, num_heads, head_dim], dim 0 strided
  void* out;            // [num_seqs, num_heads, value_dim], dim 0 strided
  const void* k_cache;  // [num_blocks, num_kv_heads, block_size, head_dim], dim 0 strided
  const void* v_cache;  // rows of value_dim elements, head_dim apart
  const int32_t* block_tables;  // [num_seqs, max_blocks], dim 0 strided
  const int32_t* context_lens;  // [num_seqs]
  const float* sinks;           // [num_heads] logits that take weight from the tokens, or null
  DType q_dtype, out_dtype, kv_dtype;
  int num_seqs, num_heads, num_kv_heads, head_dim, value_dim;
  int64_t num_blocks;
  int block_size, max_blocks;
  int64_t q_stride, out_stride, k_block_stride, v_block_stride, table_stride;  // in elements
  float scale;
  int sliding_window;  // attend to the last `sliding_window` tokens only; 0: to all
  bool bf16_round;     // round each dot product to bfloat16

  int group() const { return num_heads / num_kv_heads; }
  bool values_in_keys() const { return v_cache == k_cache; }
  int first_token(int seq) const {
    const int length = context_lens[seq];
    return sliding_window > 0 && length > sliding_window ? length - sliding_window : 0;
  }
};

// Tokens [first, last) of KV heads [first_head, last_head) of one sequence: what one thread does at a time.
struct DecodePiece {
  int seq, first_head, last_head, first, last;

  int num_heads() const { return last_head - first_head; }
};

// A state is what the softmax of one KV head's `group` query heads needs to be continued or merged: maxima and sums in
// score vectors (vec.h), then `group` rows of unnormalised outputs in kernel order. A piece has one state a KV head.
struct DecodeKernel {
  // While it computes the end of `piece` it fetches the start of `next`, which may be null.
  void (*attend)(const DecodeRequest&, const DecodePiece& piece, const DecodePiece* next, float* states);
  // Merges the states of one KV head (exactly: rescaled to their common maximum) and writes the output rows.
  void (*finish)(const DecodeRequest&, int seq, int kv_head, const float* const* states, int num_states);
  int64_t (*state_floats)(const DecodeRequest&);
};

namespace amx {  // for q and caches of bfloat16, and rows of a multiple of 32
DecodeKernel decode_kernel(const DecodeRequest& request);
}
namespace avx512bf16 {  // for q and caches of bfloat16
DecodeKernel decode_kernel(const DecodeRequest& request);
}
namespace avx512 {
DecodeKernel decode_kernel(const DecodeRequest& request);
}
namespace avx2 {
DecodeKernel decode_kernel(const DecodeRequest& request);
}
namespace portable {
DecodeKernel decode_kernel(const DecodeRequest& request);
}

// Runs on `pool` (its threads and, if it has one, the caller's share), or in the caller when `pool` is null.
// Throws std::invalid_argument, naming the argument, for a length or a used block id out of range.
void decode_attention(const DecodeRequest& request, ThreadPool* pool);

}  // namespace kernels
