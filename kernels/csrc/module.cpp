// The Python border. Arguments are addresses, sizes and strides that kernels/*.py has validated.
#include <pybind11/pybind11.h>

#include <thread>

#include "append/kv_append.h"
#include "attention/decode.h"
#include "core/isa.h"
#include "linear/linear.h"
#include "link/clock.h"
#include "link/paced_copy.h"
#include "memory/stream.h"
#include "pool/thread_pool.h"

namespace py = pybind11;
using namespace kernels;

namespace {

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

void bind_decode(py::module_& m) {
  m.def("decode_attention",
        [](uintptr_t q, uintptr_t out, uintptr_t k_cache, uintptr_t v_cache, uintptr_t block_tables,
           uintptr_t context_lens, int q_dtype, int out_dtype, int kv_dtype, int num_seqs, int num_heads,
           int num_kv_heads, int head_dim, int64_t num_blocks, int block_size, int max_blocks, int64_t q_stride,
           int64_t out_stride, int64_t k_block_stride, int64_t v_block_stride, int64_t table_stride, float scale,
           int sliding_window, bool bf16_round, int num_threads) {
          const DecodeRequest request{pointer(q), pointer(out), pointer(k_cache), pointer(v_cache),
                                      static_cast<const int32_t*>(pointer(block_tables)),
                                      static_cast<const int32_t*>(pointer(context_lens)), DType(q_dtype),
                                      DType(out_dtype), DType(kv_dtype), num_seqs, num_heads, num_kv_heads, head_dim,
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

void bind_linear(py::module_& m) {
  m.def("linear", [](uintptr_t x, uintptr_t w, uintptr_t y, int x_dtype, int y_dtype, int64_t num_rows,
                     int64_t num_outputs, int64_t depth, int64_t x_stride, int64_t w_stride, int64_t y_stride,
                     int num_threads) {
    const LinearRequest request{pointer(x), static_cast<const bf16*>(pointer(w)), pointer(y), DType(x_dtype),
                                DType(y_dtype), num_rows, num_outputs, depth, x_stride, w_stride, y_stride};
    py::gil_scoped_release unlocked;
    linear(request, default_pool(num_threads));
  });
}

void bind_link(py::module_& m) {
  m.def("paced_copy", [](uintptr_t dst, uintptr_t src, int64_t num_bytes, double rate_bytes_s, double deadline_s) {
    py::gil_scoped_release unlocked;
    return paced_copy(pointer(dst), pointer(src), num_bytes, rate_bytes_s, deadline_s);
  });
  m.def("sleep_until", [](double deadline_s) {
    py::gil_scoped_release unlocked;
    TimerSlack slack;
    sleep_until(deadline_s);
  });
  m.def("thread_cpu_s", &thread_cpu_s);
}

void bind_memory(py::module_& m) {
  m.def("stream_read", [](uintptr_t src, int64_t num_bytes, int num_threads) {
    py::gil_scoped_release unlocked;
    return stream_read(pointer(src), num_bytes, default_pool(num_threads));
  });
  m.def("stream_copy", [](uintptr_t dst, uintptr_t src, int64_t num_bytes, int num_threads) {
    py::gil_scoped_release unlocked;
    parallel_stream_copy(pointer(dst), pointer(src), num_bytes, default_pool(num_threads));
  });
  m.def("advise_huge_pages",
        [](uintptr_t address, int64_t num_bytes) { return advise_huge_pages(pointer(address), num_bytes); });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  bind_decode(m);
  bind_append(m);
  bind_linear(m);
  bind_link(m);
  bind_memory(m);
  m.def("isa", [] { return isa_name(current_isa()); });
  m.def("set_isa", &set_isa);
  m.def("supported_isas", [] {
    py::list names;
    for (Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kPortable})
      if (isa_supported(isa)) names.append(isa_name(isa));
    return names;
  });
}
