// The first half of the expert FFN in vector registers: see product.h.
#pragma once

#include "../product/row_product.h"
#include "activation.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

// The rows of gate, filled up to a whole tile, then those of up.
WeightBlock gate_up_block(const FfnRequest& r, Range range) {
  WeightBlock block;
  block.add(r.gate, r.gate_stride, range.first, range.last, kMostTileOutputs);
  block.add(r.up, r.up_stride, range.first, range.last, kMostTileOutputs);
  return block;
}

Vec with_bias(const float* sums, const float* bias, int count) {
  return bias ? add(load(sums), load_partial(bias, count)) : load(sums);
}

// A token's sums with the block of `range` become its h.
template <class W>
void activate_row(const FfnRequest& r, const float* gate, const float* up, Range range, int64_t token,
                  const PackedRows<float, W>& h) {
  const Range group = h.group_of(token);
  for (int64_t unit = range.first; unit < range.last; unit += kWidth, gate += kWidth, up += kWidth) {
    const int count = int(std::min<int64_t>(kWidth, range.last - unit));
    alignas(64) float values[kWidth];
    store(values, activate(r, with_bias(gate, r.gate_bias ? r.gate_bias + unit : nullptr, count),
                           with_bias(up, r.up_bias ? r.up_bias + unit : nullptr, count)));
    h.set(group, token, unit, values, count);
  }
}

template <class W>
void gate_up_with(const FfnRequest& r, const float* x, Range range, const NextWeights& next, float* h) {
  const WeightBlock block = gate_up_block(r, range);
  const PackedRows<float, W> hidden(h, r.num_tokens, r.expert_dim);
  with_packed<W>(x, r.x_dtype, r.num_tokens, r.hidden, [&](const auto& rows) {
    multiply_block(rows, block, next, [&](int64_t token, int64_t last, const float* sums) {
      for (; token < last; ++token, sums += kMaxBlockRows)
        activate_row(r, sums, sums + block.num_rows / 2, range, token, hidden);
    });
  });
}

void gate_up(const FfnRequest& r, const float* x, Range range, const NextWeights& next, float* h) {
  r.w_dtype == DType::kFp16 ? gate_up_with<fp16>(r, x, range, next, h) : gate_up_with<bf16>(r, x, range, next, h);
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
