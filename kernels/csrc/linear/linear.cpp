#include "linear.h"

#include <algorithm>
#include <vector>

#include "../core/isa.h"
#include "../pool/thread_pool.h"

namespace kernels {
namespace {

// Outputs that are computed for all rows before the next ones: their weights (256 KB at a depth of 512) stay in L2
// while the rows pass by.
int64_t outputs_per_block(int64_t depth) { return std::max<int64_t>(16, (128 << 10) / std::max<int64_t>(depth, 1) / 4 * 4); }

}  // namespace

void linear(const LinearRequest& r, ThreadPool* pool) {
  const Isa isa = current_isa();
  const auto padded = isa == Isa::kAvx512 ? avx512::linear_padded_depth
                      : isa == Isa::kAvx2 ? avx2::linear_padded_depth
                                          : portable::linear_padded_depth;
  const auto prepare = isa == Isa::kAvx512 ? avx512::linear_prepare
                       : isa == Isa::kAvx2 ? avx2::linear_prepare
                                           : portable::linear_prepare;
  const auto block = isa == Isa::kAvx512 ? avx512::linear_block
                     : isa == Isa::kAvx2 ? avx2::linear_block
                                         : portable::linear_block;
  thread_local std::vector<float> buffer;
  buffer.resize(size_t(r.num_rows * padded(r.depth)));
  float* const x = buffer.data();
  prepare(r, x);
  const int64_t step = outputs_per_block(r.depth);
  const int64_t num_blocks = (r.num_outputs + step - 1) / step;
  for_each_item(pool, num_blocks, [&](int64_t i, int64_t) {
    block(r, x, i * step, std::min(r.num_outputs, (i + 1) * step));
  });
}

}  // namespace kernels
