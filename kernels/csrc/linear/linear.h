// y = x W^T with bfloat16 weights read in place and float32 sums: for few rows of x at the speed of the weights' memory.
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

// A block of outputs [first, last) for all rows; `x` is in kernel order and float32, `depth_padded` floats a row.
#define KERNELS_DECLARE_LINEAR                                                                            \
  int64_t linear_padded_depth(int64_t depth);                                                             \
  void linear_prepare(const LinearRequest& request, float* x);                                            \
  void linear_block(const LinearRequest& request, const float* x, int64_t first, int64_t last);
namespace avx512 {
KERNELS_DECLARE_LINEAR
}
namespace avx2 {
KERNELS_DECLARE_LINEAR
}
namespace portable {
KERNELS_DECLARE_LINEAR
}
#undef KERNELS_DECLARE_LINEAR

}  // namespace kernels
