#include "linear.h"

#include <algorithm>

#include "../core/scratch.h"
#include "../pool/thread_pool.h"
#include "../product/product.h"

namespace kernels {
namespace {

// The part of the request that concerns `num` rows of x from `first` on.
LinearRequest slab(const LinearRequest& r, int64_t first, int64_t num) {
  LinearRequest part = r;
  part.num_rows = num;
  part.x = static_cast<const char*>(r.x) + first * r.x_stride * size_bytes(r.x_dtype);
  part.y = static_cast<char*>(r.y) + first * r.y_stride * size_bytes(r.y_dtype);
  return part;
}

void run_slab(const LinearRequest& r, ThreadPool* pool) {
  const ProductKernel kernel = product_kernel(r.w_dtype);
  const ScratchLoan scratch(size_t(kernel.packed_floats(r.x_dtype, r.num_rows, r.depth)));
  kernel.pack({r.x, r.x_dtype, r.w_dtype, r.num_rows, r.depth, r.x_stride}, scratch.floats());
  const int64_t step = kernel.block_rows(r.num_rows, r.num_outputs, pool ? pool->size() : 1);
  for_each_item(pool, (r.num_outputs + step - 1) / step, [&](int64_t i, int64_t next) {
    kernel.outputs(r, scratch.floats(), range_of_item(i, step, r.num_outputs),
                   next_weights(r, range_of_item(next, step, r.num_outputs)));
  });
}

}  // namespace

void linear(const LinearRequest& r, ThreadPool* pool) {
  for (int64_t first = 0; first < r.num_rows; first += kSlabRows)
    run_slab(slab(r, first, std::min(kSlabRows, r.num_rows - first)), pool);
}

}  // namespace kernels
