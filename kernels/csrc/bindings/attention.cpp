#include "../attention/decode.h"

#include "../append/kv_append.h"
#include "bindings.h"

namespace kernels {

void bind_attention(py::module_& m) {
  m.def("decode_attention",
        [](uintptr_t q, uintptr_t out, uintptr_t k_cache, uintptr_t v_cache, uintptr_t block_tables,
           uintptr_t context_lens, uintptr_t sinks, int q_dtype, int out_dtype, int kv_dtype, int num_seqs,
           int num_heads, int num_kv_heads, int head_dim, int value_dim, int64_t num_blocks, int block_size,
           int max_blocks, int64_t q_stride, int64_t out_stride, int64_t k_block_stride, int64_t v_block_stride,
           int64_t table_stride, float scale, int sliding_window, bool bf16_round, int num_threads) {
          const DecodeRequest request{pointer(q), pointer(out), pointer(k_cache), pointer(v_cache),
                                      pointer_to<const int32_t>(block_tables), pointer_to<const int32_t>(context_lens),
                                      pointer_to<const float>(sinks), DType(q_dtype), DType(out_dtype),
                                      DType(kv_dtype), num_seqs, num_heads, num_kv_heads, head_dim, value_dim,
                                      num_blocks, block_size, max_blocks, q_stride, out_stride, k_block_stride,
                                      v_block_stride, table_stride, scale, sliding_window, bf16_round};
          py::gil_scoped_release unlocked;
          decode_attention(request, default_pool(num_threads));
        });
}

void bind_append(py::module_& m) {
  m.def("kv_append",
        [](uintptr_t k, uintptr_t v, uintptr_t k_cache, uintptr_t v_cache, uintptr_t slots, bool slots_are_64_bit,
           int src_dtype, int cache_dtype, int64_t num_tokens, int64_t num_blocks, int num_kv_heads, int head_dim,
           int block_size, int64_t k_stride, int64_t v_stride, int64_t k_block_stride, int64_t v_block_stride) {
          const AppendRequest request{pointer(k), pointer(v), pointer(k_cache), pointer(v_cache), pointer(slots),
                                      slots_are_64_bit, DType(src_dtype), DType(cache_dtype), num_tokens, num_blocks,
                                      num_kv_heads, head_dim, block_size, k_stride, v_stride, k_block_stride,
                                      v_block_stride};
          py::gil_scoped_release unlocked;
          kv_append(request);
        });
}

}  // namespace kernels
