// Decode attention over sequences that lie one after another, as `kv_gather` leaves them.
#pragma once

#include "decode.h"

namespace kernels {

// `request` is that of paged attention without its cache: of it, k_cache is where the first sequence begins and
// context_lens how long each is. A sequence is [num_kv_heads, length, head_dim] of keys, then as much of values where
// `has_values`; else its values are the first value_dim elements of its keys. `num_elements` lie there in all.
// Throws std::invalid_argument, naming the argument, for a length below 0 or where the lengths need another number.
void staged_attention(const DecodeRequest& request, bool has_values, int64_t num_elements, ThreadPool* pool);

}  // namespace kernels
