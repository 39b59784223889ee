// The expert FFN of one instruction set: see ffn.h.
#pragma once

#include "../linear/product_kernel.h"
#include "activation.h"
#include "ffn_output.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

void pack(const FfnRequest& r, float* x) {
  pack_rows(r.x, r.x_dtype, r.num_tokens, r.hidden, r.x_stride, x);
}

// The rows of gate, filled up to a whole tile, then those of up.
WeightBlock gate_up_block(const FfnRequest& r, Range range) {
  WeightBlock block;
  block.add(r.gate, r.gate_stride, range.first, range.last, kOutputs);
  block.add(r.up, r.up_stride, range.first, range.last, kOutputs);
  return block;
}

Vec with_bias(const float* sums, const float* bias, int count) {
  return bias ? add(load(sums), load_partial(bias, count)) : load(sums);
}

void gate_up(const FfnRequest& r, const float* x, Range range, Range next, float* h) {
  const WeightBlock block = gate_up_block(r, range);
  const int64_t num_units = range.last - range.first, up = block.num_rows / 2;
  multiply_block(x, r.num_tokens, r.hidden, block, gate_up_block(r, next),
                 [&](int64_t token, int64_t last, const float* sums) {
    for (; token < last; ++token, sums += kMaxBlockRows)
      for (int64_t i = 0; i < num_units; i += kWidth) {
        const int count = int(std::min<int64_t>(kWidth, num_units - i));
        const int64_t unit = range.first + i;
        alignas(64) float values[kWidth];
        store(values, activate(r, with_bias(sums + i, r.gate_bias ? r.gate_bias + unit : nullptr, count),
                               with_bias(sums + up + i, r.up_bias ? r.up_bias + unit : nullptr, count)));
        for (int j = 0; j < count; ++j)
          h[packed_position(token, unit + j, r.num_tokens, r.expert_dim)] = values[j];
      }
  });
}

void down(const FfnRequest& r, const float* h, Range range, Range next) {
  WeightBlock block, next_block;
  block.add(r.down, r.down_stride, range.first, range.last, kOutputs);
  next_block.add(r.down, r.down_stride, next.first, next.last, kOutputs);
  multiply_block(h, r.num_tokens, r.expert_dim, block, next_block,
                 [&](int64_t token, int64_t last, const float* sums) {
    for (; token < last; ++token, sums += kMaxBlockRows)
      put(r, token, range, sums);
  });
}

}  // namespace

FfnKernel ffn_kernel() { return {packed_floats, block_rows, pack, gate_up, down}; }

}  // namespace kernels::KERNELS_ISA_NS
