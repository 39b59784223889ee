// The linear layer of one instruction set: see linear.h.
#pragma once

#include "linear_output.h"
#include "product_kernel.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

void pack(const LinearRequest& r, float* x) {
  pack_rows(r.x, r.x_dtype, r.num_rows, r.depth, r.x_stride, x);
}

void outputs(const LinearRequest& r, const float* x, Range range, Range next) {
  WeightBlock block, next_block;
  block.add(r.w, r.w_stride, range.first, range.last, kOutputs);
  next_block.add(r.w, r.w_stride, next.first, next.last, kOutputs);
  multiply_block(x, r.num_rows, r.depth, block, next_block, [&](int64_t row, int64_t last, const float* sums) {
    for (; row < last; ++row, sums += kMaxBlockRows) put(r, row, range.first, range.last, sums);
  });
}

}  // namespace

LinearKernel linear_kernel() { return {packed_floats, block_rows, pack, outputs}; }

}  // namespace kernels::KERNELS_ISA_NS
