// y = x W^T with bfloat16 weights read in place and float32 sums: for few rows of x at the speed of memory.
#pragma once

#include <cstdint>

#include "../core/types.h"

namespace kernels {

class ThreadPool;

// x [num_rows, depth], w [num_outputs, depth] bf16, y [num_rows, num_outputs]; strides in elements of each.
struct LinearRequest {
  const void* x;
  const bf16* w;
  void* y;
  DType x_dtype, y_dtype;  // kBf16 or kFp32
  int64_t num_rows, num_outputs, depth;
  int64_t x_stride, w_stride, y_stride;
};

void linear(const LinearRequest& request, ThreadPool* pool);

// Rows of x that are computed together: with more, the buffers would outgrow the caches and, in the end, the memory.
constexpr int64_t kSlabRows = 528;

// Tiles take 16 rows of x, however few there are: with fewer than this, vectors are faster (docs/kernels.md).
constexpr int64_t kLeastTileRows = 7;

struct Range {
  int64_t first, last;
};
// Item `i` of `num` things taken `step` at a time; empty beyond the last.
inline Range range_of_item(int64_t i, int64_t step, int64_t num) {
  const auto clamp = [&](int64_t value) { return value < num ? value : num; };
  return {clamp(i * step), clamp((i + 1) * step)};
}

// `pack` brings x into the kernel's order and type, in a buffer of packed_floats that is aligned to lines. `outputs`
// computes a range of outputs, block_rows long, and fetches the first weights of the `next` one.
struct LinearKernel {
  int64_t (*packed_floats)(DType x_dtype, int64_t num_rows, int64_t depth);
  int64_t (*block_rows)(int64_t num_rows, int64_t num_outputs, int num_threads);
  void (*pack)(const LinearRequest&, float* x);
  void (*outputs)(const LinearRequest&, const float* x, Range range, Range next);
};
namespace amx {
LinearKernel linear_kernel();
}
namespace avx512 {
LinearKernel linear_kernel();
}
namespace avx2 {
LinearKernel linear_kernel();
}
namespace portable {
LinearKernel linear_kernel();
}

}  // namespace kernels
