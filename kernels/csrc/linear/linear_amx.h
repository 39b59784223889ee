// The linear layer with tiles: see linear.h.
#pragma once

#include "../amx/tile_product.h"
#include "linear_output.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

TokenTiles packed(const LinearRequest& r, const float* x) {
  return TokenTiles(const_cast<float*>(x), r.x_dtype, r.num_rows, r.depth);
}

void pack(const LinearRequest& r, float* x) { pack_tokens(packed(r, x), r.x, r.x_dtype, r.x_stride); }

void outputs(const LinearRequest& r, const float* x, Range range, Range next) {
  multiply_rows(packed(r, x), r.w, r.w_stride, range, next,
                [&](int64_t row, Range outputs, const float* sums) { put(r, row, outputs.first, outputs.last, sums); });
}

}  // namespace

LinearKernel linear_kernel() { return {packed_floats, block_rows, pack, outputs}; }

}  // namespace kernels::KERNELS_ISA_NS
