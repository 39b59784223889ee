#include "ffn.h"

#include <algorithm>

#include "../core/isa.h"
#include "../core/scratch.h"
#include "../pool/thread_pool.h"

namespace kernels {
namespace {

FfnKernel choose_kernel(int64_t num_tokens) {
  switch (num_tokens < kLeastTileRows ? current_vector_isa() : current_isa()) {
    case Isa::kAmx: return amx::ffn_kernel();
    case Isa::kAvx512: return avx512::ffn_kernel();
    case Isa::kAvx2: return avx2::ffn_kernel();
    default: return portable::ffn_kernel();
  }
}

// The part of the request that concerns `num` tokens from `first` on.
FfnRequest slab(const FfnRequest& r, int64_t first, int64_t num) {
  FfnRequest part = r;
  part.num_tokens = num;
  part.x = static_cast<const char*>(r.x) + first * r.x_stride * size_bytes(r.x_dtype);
  part.out = static_cast<char*>(r.out) + first * r.out_stride * size_bytes(r.out_dtype);
  if (r.row_weights) part.row_weights = r.row_weights + first;
  return part;
}

void run_slab(const FfnRequest& r, ThreadPool* pool) {
  const FfnKernel kernel = choose_kernel(r.num_tokens);
  const int64_t x_floats = (kernel.packed_floats(r.x_dtype, r.num_tokens, r.hidden) + 15) / 16 * 16;
  const ScratchLoan scratch(size_t(x_floats + kernel.packed_floats(DType::kFp32, r.num_tokens, r.expert_dim)));
  float* const x = scratch.floats();
  float* const h = x + x_floats;
  kernel.pack(r, x);
  const int num_threads = pool ? pool->size() : 1;
  const int64_t units = kernel.block_rows(r.num_tokens, 2 * r.expert_dim, num_threads) / 2;
  const int64_t step = kernel.block_rows(r.num_tokens, r.hidden, num_threads);
  for_each_item(pool, (r.expert_dim + units - 1) / units, [&](int64_t i, int64_t next) {
    kernel.gate_up(r, x, range_of_item(i, units, r.expert_dim), range_of_item(next, units, r.expert_dim), h);
  });
  for_each_item(pool, (r.hidden + step - 1) / step, [&](int64_t i, int64_t next) {
    kernel.down(r, h, range_of_item(i, step, r.hidden), range_of_item(next, step, r.hidden));
  });
}

}  // namespace

void expert_ffn(const FfnRequest& r, ThreadPool* pool) {
  for (int64_t first = 0; first < r.num_tokens; first += kSlabRows)
    run_slab(slab(r, first, std::min(kSlabRows, r.num_tokens - first)), pool);
}

}  // namespace kernels
