// Where the down projection's sums go.
#pragma once

#include "ffn.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

template <class Out>
void put_as(const FfnRequest& r, int64_t token, Range range, const float* sums) {
  const float weight = r.row_weights ? r.row_weights[token] : 1.0f;
  Out* const out = static_cast<Out*>(r.out) + token * r.out_stride;
  for (int64_t n = range.first; n < range.last; ++n) {
    const float value = weight * (r.down_bias ? sums[n - range.first] + r.down_bias[n] : sums[n - range.first]);
    out[n] = from_float<Out>(r.accumulate ? to_float(out[n]) + value : value);
  }
}

// A token's outputs of `range`.
void put(const FfnRequest& r, int64_t token, Range range, const float* sums) {
  r.out_dtype == DType::kFp32 ? put_as<float>(r, token, range, sums) : put_as<bf16>(r, token, range, sums);
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
