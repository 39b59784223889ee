// The linear layer with tiles: see product.h.
#pragma once

#include "../amx/tile_product.h"
#include "../product/output.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

// Returns the view of x as `pack` leaves it, or of h, in `packed_floats` of memory.
TokenTiles packed_tokens(const float* start, DType dtype, int64_t num_tokens, int64_t depth) {
  return TokenTiles(const_cast<float*>(start), dtype, num_tokens, depth);
}

void pack(const InputRows& x, float* packed) {
  pack_tokens(packed_tokens(packed, x.dtype, x.num_rows, x.depth), x);
}

void outputs(const LinearRequest& r, const float* x, Range range, const NextWeights& next) {
  const TokenTiles tokens = packed_tokens(x, r.x_dtype, r.num_rows, r.depth);
  multiply_rows(tokens, static_cast<const bf16*>(r.w), r.w_stride, range, next,
                [&](int64_t row, Range outputs, const float* sums) { put(r, row, outputs, sums); });
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
