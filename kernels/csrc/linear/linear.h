// y = x W^T with bfloat16 or float16 weights read in place and float32 sums: for few rows of x at the speed of memory.
#pragma once

#include <cstdint>

#include "../core/types.h"

namespace kernels {

class ThreadPool;

// x [num_rows, depth], w [num_outputs, depth], y [num_rows, num_outputs]; strides in elements of each.
struct LinearRequest {
  const void* x;
  const void* w;
  void* y;
  DType x_dtype, w_dtype, y_dtype;  // of w kBf16 or kFp16; of x and y the same or kFp32
  int64_t num_rows, num_outputs, depth;
  int64_t x_stride, w_stride, y_stride;
  const float* bias = nullptr;         // [num_outputs], or null
  const float* row_weights = nullptr;  // [num_rows], times the outputs with their bias, or null: 1
  bool accumulate = false;             // add to `y` instead of overwriting it
};

// Multiplies without row weights: only an expert has these (ffn.h).
void linear(const LinearRequest& request, ThreadPool* pool);

}  // namespace kernels
