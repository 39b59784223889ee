// The linear layer in vector registers: see product.h.
#pragma once

#include "../product/output.h"
#include "../product/row_product.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

void pack(const InputRows& x, float* packed) {
  if (x.dtype == DType::kFp32)
    pack_rows<float>(x, PackedRows<float>(packed, x.num_rows, x.depth));
  else
    pack_rows<bf16>(x, PackedRows<PackedBf16>(packed, x.num_rows, x.depth));
}

WeightBlock output_block(const LinearRequest& r, Range range) {
  WeightBlock block;
  block.add(r.w, r.w_stride, range.first, range.last, kMostTileOutputs);
  return block;
}

void outputs(const LinearRequest& r, const float* x, Range range, Range next) {
  with_packed(x, r.x_dtype, r.num_rows, r.depth, [&](const auto& rows) {
    multiply_block(rows, output_block(r, range), output_block(r, next),
                   [&](int64_t row, int64_t last, const float* sums) {
                     for (; row < last; ++row, sums += kMaxBlockRows) put(r, row, range, sums);
                   });
  });
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
