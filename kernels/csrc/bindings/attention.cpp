#include <pybind11/stl.h>

#include <tuple>

#include "../attention/staged.h"
#include "../cache/kv_append.h"
#include "../cache/kv_gather.h"
#include "bindings.h"

namespace kernels {

void bind_attention(py::module_& m) {
  m.def("decode_attention",
        [](int value_dim, int num_seqs, int num_heads, int head_dim, int64_t num_blocks, int num_kv_heads,
           int block_size, int max_blocks, uintptr_t q, uintptr_t k_cache, uintptr_t v_cache, uintptr_t block_tables,
           uintptr_t context_lens, uintptr_t out, uintptr_t sinks, int q_dtype, int kv_dtype, int out_dtype,
           int64_t q_stride, int64_t k_block_stride, int64_t v_block_stride, int64_t table_stride, int64_t out_stride,
           float scale, int sliding_window, bool bf16_round, int num_threads) {
          const DecodeRequest request{pointer(q), pointer(out), pointer(k_cache), pointer(v_cache),
                                      pointer_to<const int32_t>(block_tables), pointer_to<const int32_t>(context_lens),
                                      pointer_to<const float>(sinks), DType(q_dtype), DType(out_dtype),
                                      DType(kv_dtype), num_seqs, num_heads, num_kv_heads, head_dim, value_dim,
                                      num_blocks, block_size, max_blocks, q_stride, out_stride, k_block_stride,
                                      v_block_stride, table_stride, scale, sliding_window, bf16_round};
          py::gil_scoped_release unlocked;
          decode_attention(request, default_pool(num_threads));
        });
  m.def("staged_attention",
        [](bool has_values, int num_kv_heads, int value_dim, int num_seqs, int num_heads, int head_dim,
           int64_t num_elements, uintptr_t q, uintptr_t staging, uintptr_t context_lens, uintptr_t out, uintptr_t sinks,
           int q_dtype, int kv_dtype, int out_dtype, int64_t q_stride, int64_t out_stride, float scale,
           int sliding_window, bool bf16_round, int num_threads) {
          DecodeRequest request{};
          request.q = pointer(q), request.out = pointer(out), request.k_cache = pointer(staging);
          request.context_lens = pointer_to<const int32_t>(context_lens);
          request.sinks = pointer_to<const float>(sinks);
          request.q_dtype = DType(q_dtype), request.out_dtype = DType(out_dtype), request.kv_dtype = DType(kv_dtype);
          request.num_seqs = num_seqs, request.num_heads = num_heads, request.num_kv_heads = num_kv_heads;
          request.head_dim = head_dim, request.value_dim = value_dim;
          request.q_stride = q_stride, request.out_stride = out_stride;
          request.scale = scale, request.sliding_window = sliding_window, request.bf16_round = bf16_round;
          py::gil_scoped_release unlocked;
          staged_attention(request, has_values, num_elements, default_pool(num_threads));
        });
}

void bind_cache(py::module_& m) {
  m.def("kv_append",
        [](int64_t num_tokens, int num_kv_heads, int head_dim, int64_t num_blocks, int block_size, uintptr_t k,
           uintptr_t v, uintptr_t k_cache, uintptr_t v_cache, uintptr_t slots, int src_dtype, int cache_dtype,
           int slots_dtype, int64_t k_stride, int64_t v_stride, int64_t k_block_stride, int64_t v_block_stride,
           int num_threads) {
          const AppendRequest request{pointer(k), pointer(v), pointer(k_cache), pointer(v_cache), pointer(slots),
                                      slots_dtype == kInt64, DType(src_dtype), DType(cache_dtype), num_tokens,
                                      num_blocks, num_kv_heads, head_dim, block_size, k_stride, v_stride,
                                      k_block_stride, v_block_stride};
          py::gil_scoped_release unlocked;
          kv_append(request, default_pool(num_threads));
        });
  m.def("kv_gather",
        [](const std::vector<std::tuple<uintptr_t, int64_t, int64_t, int>>& pieces, uintptr_t block_tables,
           uintptr_t lengths, uintptr_t out, int64_t num_blocks, int64_t table_stride, int64_t out_bytes, int num_seqs,
           int max_blocks, int block_size) {
          GatherRequest request{{}, pointer_to<const int32_t>(block_tables), pointer_to<const int32_t>(lengths),
                                pointer(out), num_blocks, table_stride, out_bytes, num_seqs, max_blocks, block_size};
          for (const auto& [cache, block_stride_bytes, row_bytes, num_heads] : pieces)
            request.pieces.push_back({pointer(cache), block_stride_bytes, row_bytes, num_heads});
          py::gil_scoped_release unlocked;
          kv_gather(request);
        });
}

}  // namespace kernels
