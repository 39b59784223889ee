// An instruction set's part in products with bfloat16 or float16 weights: the linear layer and the expert FFN are made
// of it.
#pragma once

#include <cstdint>

#include "../core/types.h"
#include "../ffn/ffn.h"
#include "../linear/linear.h"

namespace kernels {

// Rows of x that are computed together: with more, the buffers would outgrow the caches and, in the end, the memory.
constexpr int64_t kSlabRows = 528;

struct Range {
  int64_t first, last;
};
// Item `i` of `num` things taken `step` at a time; empty beyond the last.
inline Range range_of_item(int64_t i, int64_t step, int64_t num) {
  const auto clamp = [&](int64_t value) { return value < num ? value : num; };
  return {clamp(i * step), clamp((i + 1) * step)};
}

// Rows in float32 or in the dtype of the weights that they are multiplied with, `stride` elements apart.
struct InputRows {
  const void* start;
  DType dtype, w_dtype;
  int64_t num_rows, depth, stride;
};

// The weights that the same thread multiplies with next, of any request: rows `range` of each matrix, with so many rows
// of x of such a type. An empty range: none.
struct NextWeights {
  const void* matrices[2];
  int64_t strides[2];  // in elements
  int num_matrices;
  Range range;
  int64_t depth, num_rows;
  DType x_dtype, w_dtype;
};
inline NextWeights next_weights(const LinearRequest& r, Range range) {
  return {{r.w, nullptr}, {r.w_stride, 0}, 1, range, r.depth, r.num_rows, r.x_dtype, r.w_dtype};
}
inline NextWeights next_weights(const FfnRequest& r, Range range) {
  return {{r.gate, r.up}, {r.gate_stride, r.up_stride}, 2, range, r.hidden, r.num_tokens, r.x_dtype, r.w_dtype};
}

// `pack` brings rows into the kernel's order and type, in a buffer of packed_floats that is aligned to lines. `outputs`
// computes a range of the linear layer's outputs from packed x, and `gate_up` one of the FFN's hidden columns, from two
// weight rows each, packed as float32 rows are; both fetch the first weights of `next`. A range is at most as long as
// block_rows says for these weights (gate_up: half as long), and starts at a multiple of that. How outputs are cut into
// ranges changes no bit of them.
struct ProductKernel {
  int64_t (*packed_floats)(DType x_dtype, int64_t num_rows, int64_t depth);
  int64_t (*block_rows)(int64_t num_rows, int64_t num_weight_rows, int num_threads);
  void (*pack)(const InputRows&, float* packed);
  void (*outputs)(const LinearRequest&, const float* x, Range range, const NextWeights& next);
  void (*gate_up)(const FfnRequest&, const float* x, Range range, const NextWeights& next, float* h);
};

// The current path's for these weights.
ProductKernel product_kernel(DType w_dtype);

namespace amx {
ProductKernel product_kernel();
}
namespace avx512bf16 {
ProductKernel product_kernel();
}
namespace avx512 {
ProductKernel product_kernel();
}
namespace avx2 {
ProductKernel product_kernel();
}
namespace portable {
ProductKernel product_kernel();
}

}  // namespace kernels
