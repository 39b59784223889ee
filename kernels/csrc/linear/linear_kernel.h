// The linear layer in vector registers: see product.h.
#pragma once

#include "../product/output.h"
#include "../product/row_product.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

template <class W>
void pack_for(const InputRows& x, float* packed) {
  if (x.dtype == DType::kFp32)
    pack_rows<float>(x, PackedRows<float, W>(packed, x.num_rows, x.depth));
  else
    pack_rows<W>(x, PackedRows<PackedAs<W>, W>(packed, x.num_rows, x.depth));
}

void pack(const InputRows& x, float* packed) {
  x.w_dtype == DType::kFp16 ? pack_for<fp16>(x, packed) : pack_for<bf16>(x, packed);
}

WeightBlock output_block(const LinearRequest& r, Range range) {
  WeightBlock block;
  block.add(r.w, r.w_stride, range.first, range.last, kMostTileOutputs);
  return block;
}

template <class W>
void outputs_with(const LinearRequest& r, const float* x, Range range, const NextWeights& next) {
  with_packed<W>(x, r.x_dtype, r.num_rows, r.depth, [&](const auto& rows) {
    multiply_block(rows, output_block(r, range), next,
                   [&](int64_t row, int64_t last, const float* sums) {
                     for (; row < last; ++row, sums += kMaxBlockRows) put(r, row, range, sums);
                   });
  });
}

void outputs(const LinearRequest& r, const float* x, Range range, const NextWeights& next) {
  r.w_dtype == DType::kFp16 ? outputs_with<fp16>(r, x, range, next) : outputs_with<bf16>(r, x, range, next);
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
