#include "ffn.h"

#include <algorithm>

#include "../core/scratch.h"
#include "../pool/thread_pool.h"
#include "../product/product.h"

namespace kernels {
namespace {

// The part of the request that concerns `num` tokens from `first` on.
FfnRequest slab(const FfnRequest& r, int64_t first, int64_t num) {
  FfnRequest part = r;
  part.num_tokens = num;
  part.x = static_cast<const char*>(r.x) + first * r.x_stride * size_bytes(r.x_dtype);
  part.out = static_cast<char*>(r.out) + first * r.out_stride * size_bytes(r.out_dtype);
  if (r.row_weights) part.row_weights = r.row_weights + first;
  return part;
}

// The last of the three products, from packed h.
LinearRequest down_projection(const FfnRequest& r) {
  LinearRequest down{};
  down.w = r.down, down.y = r.out;
  down.x_dtype = DType::kFp32, down.w_dtype = r.w_dtype, down.y_dtype = r.out_dtype;
  down.num_rows = r.num_tokens, down.num_outputs = r.hidden, down.depth = r.expert_dim;
  down.w_stride = r.down_stride, down.y_stride = r.out_stride;
  down.bias = r.down_bias, down.row_weights = r.row_weights, down.accumulate = r.accumulate;
  return down;
}

void run_slab(const FfnRequest& r, ThreadPool* pool) {
  const ProductKernel kernel = product_kernel(r.num_tokens, r.w_dtype);
  const int64_t x_floats = (kernel.packed_floats(r.x_dtype, r.num_tokens, r.hidden) + 15) / 16 * 16;
  const ScratchLoan scratch(size_t(x_floats + kernel.packed_floats(DType::kFp32, r.num_tokens, r.expert_dim)));
  float* const x = scratch.floats();
  float* const h = x + x_floats;
  kernel.pack({r.x, r.x_dtype, r.w_dtype, r.num_tokens, r.hidden, r.x_stride}, x);
  const int64_t units = kernel.block_rows(r.num_tokens, 2 * r.expert_dim, pool ? pool->size() : 1) / 2;
  for_each_item(pool, (r.expert_dim + units - 1) / units, [&](int64_t i, int64_t next) {
    kernel.gate_up(r, x, range_of_item(i, units, r.expert_dim), range_of_item(next, units, r.expert_dim), h);
  });
  compute_outputs(kernel, down_projection(r), h, pool);
}

}  // namespace

void expert_ffn(const FfnRequest& r, ThreadPool* pool) {
  for (int64_t first = 0; first < r.num_tokens; first += kSlabRows)
    run_slab(slab(r, first, std::min(kSlabRows, r.num_tokens - first)), pool);
}

}  // namespace kernels
